"""The problem file, the choice of shots and questions, and the prompts."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from kvferry.cli.eval.problems import (
    INSTRUCTION,
    Problem,
    chat_messages,
    completion_text,
    make_quiz,
    prompt_of,
    read_problems,
)
from kvferry.errors import InputError

OWN = Path(__file__).parents[2] / "data" / "gsm8k-like.jsonl"
GOOD = '{"question": "1 + 1?", "answer": "#### 2"}'


def some(num: int, first: int = 1) -> list[Problem]:
    return [Problem(i, f"{i}?", f"#### {i}", Decimal(i)) for i in range(first, first + num)]


def test_the_problems_of_the_repository() -> None:
    found = read_problems(str(OWN))
    assert [problem.line for problem in found] == list(range(1, 15))
    assert found[0].question.startswith("A ferry has 6 benches")
    assert found[0].answer.endswith("#### 21")
    assert [str(problem.expected) for problem in found[:7]] == [
        "21", "180", "200", "5000", "21", "-5", "7.50",
    ]  # fmt: skip


def test_empty_lines_other_fields_and_carriage_returns(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    other = GOOD.replace("{", '{"id": 3, ')
    path.write_bytes(b"\xef\xbb\xbf" + f"{GOOD}\r\n\r\n  \n{other}".encode())
    found = read_problems(str(path))
    assert [(p.line, p.question, str(p.expected)) for p in found] == [
        (1, "1 + 1?", "2"),
        (4, "1 + 1?", "2"),
    ]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "is empty; give a file with a line"),
        ("\n\n", "is empty"),
        (f"{GOOD}\nquestion,answer\n", r"line 2 of .* is not a problem"),
        (f"{GOOD}\n\n{GOOD[:-5]}", r"line 3 of .* is not a problem"),
        ("[\n{}]", r"line 1 of .* is not"),
        ("[1]", r"line 1 of .* is not a problem .*array"),
        ('{"question": "q"}', r"line 1 of .* is not a problem .*`answer`"),
        ('{"answer": "#### 1"}', r"line 1 of .* is not a problem .*`question`"),
        ('{"question": 1, "answer": "#### 1"}', r"line 1 of .* is not a problem .*\$.question"),
        (f'{GOOD}\n{{"question": "q", "answer": "42"}}', r"line 2 of .* does not end in '#### '"),
        (b'{"question": "\xff", "answer": "#### 1"}', r"cannot read .* codec"),
        ("[" * 100_000, r"line 1 of .* is not"),
    ],
)
def test_a_malformed_data_set_is_refused(
    tmp_path: Path, content: str | bytes, sentence: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InputError, match=sentence):
        read_problems(str(path))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*No such file or directory; check"):
        read_problems(str(tmp_path / "x"))
    with pytest.raises(InputError, match="Is a directory"):
        read_problems(str(tmp_path))
    with pytest.raises(InputError, match="cannot read"):
        read_problems("a\0b")


# ---------------------------------------------------------------- shots and questions


def test_the_first_lines_are_shots_and_are_not_asked() -> None:
    problems = some(10)
    quiz = make_quiz(problems, num_shots=3, num=4)
    assert [problem.line for problem in quiz.shots] == [1, 2, 3]
    assert [problem.line for problem in quiz.questions] == [4, 5, 6, 7]
    assert make_quiz(problems, num_shots=3).questions == tuple(problems[3:])
    assert make_quiz(problems, num_shots=0) == ((), tuple(problems))


def test_shots_from_another_file_leave_every_question() -> None:
    problems, train = some(5), some(9, first=100)
    quiz = make_quiz(problems, num_shots=2, train=train)
    assert quiz == (tuple(train[:2]), tuple(problems))
    assert make_quiz(problems, num_shots=9, num=5, train=train).shots == tuple(train)


def test_too_many_shots_or_questions_are_refused() -> None:
    problems = some(10)
    with pytest.raises(InputError, match=r"--num 8 is more than the 7 .* without the shots; lower"):
        make_quiz(problems, num_shots=3, num=8)
    with pytest.raises(InputError, match="--num 11 is more than the 10 questions"):
        make_quiz(problems, num_shots=2, num=11, train=some(2, first=50))
    with pytest.raises(InputError, match="10 shots and a question to ask are more than the 10 "):
        make_quiz(problems, num_shots=10)
    with pytest.raises(InputError, match=r"3 shots .* more than the 2 problems of --train"):
        make_quiz(problems, num_shots=3, train=some(2, first=50))


def test_a_question_whose_answer_is_in_the_prompt_is_refused() -> None:
    problems = some(5)
    with pytest.raises(InputError, match="line 1 of --data is also one of the shots"):
        make_quiz(problems, num_shots=1, train=problems)
    make_quiz(problems, num_shots=5, num=3, train=some(5, first=4))
    with pytest.raises(InputError, match="line 4 of --data"):
        make_quiz(problems, num_shots=5, num=4, train=some(5, first=4))


# ---------------------------------------------------------------- prompts

SHOTS = (
    Problem(1, "1 + 1?", "2\n#### 2", Decimal(2)),
    Problem(2, "2 + 2?", "4\n#### 4", Decimal(4)),
)


def test_a_completion_prompt() -> None:
    assert completion_text(SHOTS, "3 + 3?") == (
        "Question: 1 + 1?\nAnswer: 2\n#### 2\n\n"
        "Question: 2 + 2?\nAnswer: 4\n#### 4\n\n"
        "Question: 3 + 3?\nAnswer:"
    )
    assert completion_text((), "3 + 3?") == "Question: 3 + 3?\nAnswer:"


def test_a_chat_prompt() -> None:
    assert chat_messages(SHOTS[:1], "3 + 3?") == [
        {"role": "user", "content": f"1 + 1?\n\n{INSTRUCTION}"},
        {"role": "assistant", "content": "2\n#### 2"},
        {"role": "user", "content": f"3 + 3?\n\n{INSTRUCTION}"},
    ]


def test_prompts_are_fields_of_a_request() -> None:
    text = completion_text(SHOTS, "q")
    assert prompt_of(SHOTS, "q", chat=False) == {"prompt": text, "stop": ["Question:"]}
    assert prompt_of(SHOTS, "q", chat=True) == {"messages": chat_messages(SHOTS, "q")}
