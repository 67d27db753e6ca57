"""Manifests that Kubernetes' schemas take, with arguments that kvferry takes, and a Dockerfile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvferry.cli.main import build_parser

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
VERSION = "1.31"


def documents(file: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(file.read_text()) if each]


def pods() -> list[tuple[str, dict[str, Any]]]:
    return [
        (each["metadata"]["name"], each["spec"]["template"]["spec"])
        for file in FILES
        for each in documents(file)
        if "template" in each["spec"] and each["metadata"]["name"] != "kvferry-etcd"
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_schemas_take_it(file: Path) -> None:
    kubernetes_validate: Any = pytest.importorskip("kubernetes_validate")
    found = documents(file)
    assert found, f"{file.name} has no document"
    for document in found:
        kubernetes_validate.validate(document, VERSION, strict=True)


def test_a_typo_would_be_noticed() -> None:
    kubernetes_validate: Any = pytest.importorskip("kubernetes_validate")
    document = documents(FILES[0])[0]
    document["spec"]["replica"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, VERSION, strict=True)


def test_every_part_is_there() -> None:
    assert {name for name, _ in pods()} == {
        f"kvferry-{part}" for part in ("status", "router", "prefill", "decode")
    }


@pytest.mark.parametrize(("name", "pod"), pods())
def test_kvferry_takes_its_arguments(name: str, pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    values = {"POD_IP": "10.0.0.9", "POD_NAME": f"{name}-0"}
    words = [re.sub(r"\$\((\w+)\)", lambda m: values[m[1]], arg) for arg in container["args"]]
    args = build_parser().parse_args(words)
    assert args.key == "/key/cluster.key"
    given = {variable["name"] for variable in container.get("env", ())}
    assert set(re.findall(r"\$\((\w+)\)", " ".join(container["args"]))) <= given


@pytest.mark.parametrize(("name", "pod"), pods())
def test_it_is_probed_ends_gracefully_and_has_the_key(name: str, pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] == "/healthz"
    assert pod["terminationGracePeriodSeconds"] >= 20
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["secret"]["secret"]["secretName"] == "kvferry-key"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted <= set(volumes)
    assert "secret" not in mounted
    assert pod["initContainers"][0]["command"][:3] == ["install", "-m", "600"]


def test_all_meet_in_the_same_etcd() -> None:
    stateful, service, *_ = documents(ROOT / "deploy" / "kubernetes" / "etcd.yaml")
    assert (service["metadata"]["name"], service["spec"]["ports"][0]["port"]) == (
        "kvferry-etcd",
        2379,
    )
    for _, pod in pods():
        args = pod["containers"][0]["args"]
        assert "--discovery=etcd://kvferry-etcd:2379/kvferry" in args
    (etcd,) = stateful["spec"]["template"]["spec"]["containers"]
    (members,) = [arg for arg in etcd["args"] if arg.startswith("--initial-cluster=")]
    assert members.count("=http://") == stateful["spec"]["replicas"]


def test_the_dockerfile_copies_what_is_there_and_runs_kvferry() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        *sources, _ = line.split()
        assert [source for source in sources if not (ROOT / source).exists()] == []
    assert 'ENTRYPOINT ["kvferry"]' in text
    extras = re.search(r"ARG EXTRAS=(\S+)", text)
    assert extras is not None
    project = (ROOT / "pyproject.toml").read_text()
    assert [one for one in extras[1].split(",") if f"\n{one} = [" not in project] == []
    assert re.search(r"^USER 10001$", text, re.MULTILINE)
