"use strict";
(() => {
  const POLL_MS = 1000, HISTORY = 120, MANY = 12;
  const $ = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";
  const history = [];
  let token = readToken(), last = null, lastAt = 0, failedPolls = 0;

  // ---------------------------------------------------------------- formatting

  const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  function bytes(n) {
    let place = 0;
    while (n >= 1023.5 && place < UNITS.length - 1) { n /= 1024; place += 1; }
    const digits = place === 0 ? 0 : n >= 99.95 ? 0 : n >= 9.995 ? 1 : 2;
    return `${n.toFixed(digits)} ${UNITS[place]}`;
  }
  const rate = (n) => (n >= 1 ? `${bytes(n)}/s` : "–");
  function seconds(s) {
    if (s >= 5999) return `${(s / 3600).toFixed(1)} h`;
    if (s >= 99.5) return `${Math.round(s / 60)} min`;
    if (s >= 1) return `${s.toFixed(s >= 9.95 ? 0 : 1)} s`;
    return s >= 1e-3 ? `${(1e3 * s).toFixed(s >= 0.00995 ? 0 : 1)} ms` : `${(1e6 * s).toFixed(0)} µs`;
  }
  const short = (room) => (room.length > 14 ? `${room.slice(0, 6)}…${room.slice(-5)}` : room);
  const instanceOf = (endpoint) => endpoint.slice(0, endpoint.lastIndexOf("/"));

  // ---------------------------------------------------------------- elements

  function text(node, value) { if (node.textContent !== value) node.textContent = value; }
  function element(name, className, content) {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (content !== undefined) made.textContent = content;
    return made;
  }
  function drawn(name, attributes) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }
  // Reuse elements by key, so that focus and animations survive an update.
  function sync(parent, items, keyOf, make, update) {
    const old = new Map([...parent.children].filter((c) => c.dataset.key !== undefined).map((c) => [c.dataset.key, c]));
    let before = [...parent.children].filter((c) => c.dataset.key === undefined).pop() || null;
    for (const item of items) {
      const key = String(keyOf(item));
      let child = old.get(key);
      old.delete(key);
      if (!child) { child = make(item); child.dataset.key = key; }
      const next = before ? before.nextSibling : parent.firstChild;
      if (child !== next) parent.insertBefore(child, next);
      update(child, item);
      before = child;
    }
    for (const gone of old.values()) gone.remove();
  }
  function row(cells) {
    const made = element("tr");
    for (const [className] of cells) made.append(element("td", className));
    return made;
  }
  function fill(line, cells) { cells.forEach(([, value], place) => text(line.children[place], value)); }
  function openable(cell, label, open) {
    let button = cell.querySelector("button");
    if (!button) { button = element("button", "link"); button.type = "button"; cell.replaceChildren(button); }
    button.onclick = open;
    text(button, label);
    return button;
  }

  // ---------------------------------------------------------------- figures

  function showFigures(view) {
    const ranks = view.instances.flatMap((one) => one.ranks);
    const up = ranks.filter((rank) => rank.state === "up" || rank.state === "troubled").length;
    const failed = view.failures.filter((one) => one.ago_s < 600).length;
    text($("rate"), view.bytes_per_s >= 1 ? rate(view.bytes_per_s) : "idle");
    text($("rooms-rate"), view.rooms_per_s >= 100 ? view.rooms_per_s.toFixed(0) : view.rooms_per_s.toFixed(1));
    text($("open"), String(view.num_open));
    text($("ranks"), `${up} / ${ranks.length}`);
    text($("failed"), failed >= 20 ? "20+" : String(failed));
    $("ranks").parentElement.className = up < ranks.length ? "bad" : "";
    $("failed-figure").className = failed ? "warn" : "";
    text($("served"), `${view.served_by} at ${location.host}`);
    $("problem").hidden = !view.problem;
    text($("problem"), view.problem);
    document.title = up < ranks.length ? `kvferry · ${ranks.length - up} down` : "kvferry";
  }

  function showSpark(view) {
    history.push(view.bytes_per_s);
    if (history.length > HISTORY) history.shift();
    const peak = Math.max(...history, 1), step = 600 / (HISTORY - 1), from = 600 - step * (history.length - 1);
    const points = history.map((value, i) => `${(from + i * step).toFixed(1)},${(84 - 78 * value / peak).toFixed(1)}`);
    const spark = $("spark");
    if (!spark.firstChild) {
      const defs = drawn("defs", {});
      defs.innerHTML = '<linearGradient id="fade" x1="0" y1="0" x2="0" y2="1"><stop offset="0" stop-color="var(--source)" stop-opacity=".35"/><stop offset="1" stop-color="var(--source)" stop-opacity="0"/></linearGradient>';
      spark.append(defs, drawn("line", { class: "base", x1: 0, x2: 600, y1: 84, y2: 84 }), drawn("path", { class: "area" }), drawn("path", { class: "line" }));
    }
    spark.children[2].setAttribute("d", `M${from.toFixed(1)},84L${points.join("L")}L600,84Z`);
    spark.children[3].setAttribute("d", `M${points.join("L")}`);
    text($("peak"), `now ${view.bytes_per_s >= 1 ? rate(view.bytes_per_s) : "nothing"} · peak ${peak > 1 ? rate(peak) : "nothing"}`);
  }

  // ---------------------------------------------------------------- the map

  function makeInstance() {
    const card = element("div", "instance");
    const top = element("div", "top");
    top.append(element("span", "name"), element("span", "how"));
    card.append(top, element("p", "note"), element("div", "tiles"), element("p", "use"));
    return card;
  }
  function share(used, all) { return all ? `${used} of ${all} (${Math.round(100 * used / all)} %)` : ""; }
  function updateInstance(card, one) {
    const [top, note, tiles, use] = card.children;
    card.dataset.instance = one.name;
    card.classList.toggle("unready", one.note !== "");
    card.classList.toggle("many", one.ranks.length > MANY);
    text(top.children[0], one.name);
    top.children[0].title = one.name;
    text(top.children[1], `${one.sharding.split(",")[0]} · ${one.transport}`);
    top.children[1].title = one.sharding;
    note.hidden = !one.note;
    text(note, one.note);
    sync(tiles, one.ranks, (rank) => rank.rank, () => { const tile = element("div", "tile"); tile.tabIndex = 0; tile.append(element("span")); return tile; }, (tile, rank) => updateTile(tile, one, rank));
    const sum = (name) => one.ranks.reduce((total, rank) => total + rank[name], 0);
    const parts = [`${sum("num_open")} rooms`];
    if (sum("pages")) parts.push(`pages ${share(sum("pages_held"), sum("pages"))}`);
    if (sum("staging_bytes")) parts.push(`staging ${bytes(sum("staging_used_bytes"))} of ${bytes(sum("staging_bytes"))}`);
    if (sum("bytes_per_s") >= 1) parts.push(`sends ${rate(sum("bytes_per_s"))}`);
    if (sum("num_quarantined")) parts.push(`${bytes(sum("quarantined_bytes"))} of ${sum("num_quarantined")} rooms quarantined`);
    sync(use, parts, (part) => part.split(" ").slice(-1) + parts.indexOf(part), () => element("span"), (node, part) => text(node, part));
  }
  function updateTile(tile, one, rank) {
    tile.dataset.rank = `${one.name}/${rank.rank}`;
    tile.dataset.state = rank.state;
    tile.style.setProperty("--fill", rank.pages ? `${Math.min(100, 100 * rank.pages_held / rank.pages)}%` : "0%");
    text(tile.firstChild, String(rank.rank));
    const words = [`${one.name}/${rank.rank}: ${rank.state}`, rank.note, `${rank.num_open} rooms open, ${rank.num_done} done, ${rank.num_failed} failed`,
      rank.pages ? `pages held ${share(rank.pages_held, rank.pages)}, ${rank.tokens_held} tokens` : "", rank.staging_bytes ? `staging ${bytes(rank.staging_used_bytes)} of ${bytes(rank.staging_bytes)}` : "",
      rank.bytes_per_s >= 1 ? `sends ${rate(rank.bytes_per_s)}` : ""].filter(Boolean).join("\n");
    if (tile.title !== words) { tile.title = words; tile.setAttribute("aria-label", words); }
  }
  function showMap(view) {
    for (const [id, role] of [["sources", "source"], ["targets", "target"]]) {
      sync($(id), view.instances.filter((one) => one.role === role), (one) => one.name, makeInstance, updateInstance);
    }
    $("nobody").hidden = view.instances.length > 0;
  }

  // ---------------------------------------------------------------- links

  function pairs(view) {
    const found = new Map();
    for (const link of view.links) {
      const source = instanceOf(link.source), target = instanceOf(link.target), key = `${source} → ${target}`;
      const pair = found.get(key) || { key, source, target, links: 0, up: 0, rate: 0, bytes: 0, modes: new Map(), transports: new Set() };
      pair.links += 1;
      pair.up += link.state === "up";
      pair.rate += link.bytes_per_s;
      pair.bytes += link.bytes;
      if (link.mode) pair.modes.set(link.mode, (pair.modes.get(link.mode) || 0) + link.bytes_per_s + 1e-6 * link.bytes);
      pair.transports.add(link.transport);
      found.set(key, pair);
    }
    for (const pair of found.values()) {
      pair.mode = [...pair.modes].sort((a, b) => b[1] - a[1]).map((entry) => entry[0]).slice(0, 2).join(" + ");
      pair.transport = [...pair.transports].sort().join(" + ");
    }
    return [...found.values()].sort((a, b) => b.rate - a.rate || a.key.localeCompare(b.key));
  }
  function showLinks(all) {
    const cells = (pair) => [["", pair.source], ["", pair.target], ["", `${pair.up} / ${pair.links} up`], ["", pair.transport], ["", pair.mode || "–"], ["n", rate(pair.rate)], ["n", bytes(pair.bytes)]];
    sync($("links"), all, (pair) => pair.key, (pair) => row(cells(pair)), (line, pair) => {
      line.dataset.link = pair.key;
      const values = cells(pair);
      openable(line.children[0], pair.source, () => showPlan(pair));
      values.slice(1).forEach(([, value], place) => text(line.children[place + 1], value));
      line.children[2].className = pair.up < pair.links ? "down" : "";
    });
    $("no-links").hidden = all.length > 0;
  }
  function showRibbons(all) {
    const board = $("ribbons"), frame = board.getBoundingClientRect();
    if (!frame.width || getComputedStyle(board).display === "none") return;
    if (!board.firstChild) {
      const defs = drawn("defs", {});
      defs.innerHTML = '<linearGradient id="along" gradientUnits="userSpaceOnUse"><stop offset="0" stop-color="var(--source)"/><stop offset="1" stop-color="var(--target)"/></linearGradient>';
      board.append(defs);
    }
    const gradient = board.querySelector("#along");
    gradient.setAttribute("x1", 0.3 * frame.width);
    gradient.setAttribute("x2", 0.7 * frame.width);
    const card = (name) => document.querySelector(`[data-instance="${CSS.escape(name)}"]`);
    const shown = all.filter((pair) => card(pair.source) && card(pair.target)).slice(0, 64);
    const most = Math.max(...shown.map((pair) => pair.rate), 1);
    const ends = (name, key) => shown.filter((pair) => pair[key] === name);
    sync(board, shown, (pair) => pair.key, () => { const g = drawn("g", {}); g.append(drawn("path", {}), drawn("path", { class: "pulse" }), drawn("text", {}), drawn("text", { class: "sub" })); return g; }, (g, pair) => {
      const from = card(pair.source).getBoundingClientRect(), to = card(pair.target).getBoundingClientRect();
      const spread = (box, list) => box.top - frame.top + box.height * (list.indexOf(pair) + 1) / (list.length + 1);
      const x1 = from.right - frame.left, x2 = to.left - frame.left;
      const y1 = spread(from, ends(pair.source, "source")), y2 = spread(to, ends(pair.target, "target")), bend = (x2 - x1) / 2;
      const d = `M${x1},${y1}C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}`;
      const flowing = pair.rate >= 1, most_wide = pair.up < pair.links ? 5 : 25, wide = flowing ? 5 + most_wide * Math.sqrt(pair.rate / most) / Math.sqrt(Math.max(1, shown.length / 4)) : 3;
      const [path, pulse, label, sub] = g.children;
      path.setAttribute("class", `ribbon${pair.up < pair.links ? " down" : flowing ? " flowing" : ""}`);
      path.setAttribute("d", d);
      path.setAttribute("stroke-width", wide.toFixed(1));
      path.onclick = () => showPlan(pair);
      pulse.setAttribute("d", flowing ? d : "M0,0");
      pulse.setAttribute("stroke-width", Math.max(2, wide / 5).toFixed(1));
      const crowded = shown.length > 6;
      for (const [node, value, dy] of [[label, crowded ? "" : flowing ? rate(pair.rate) : "idle", -4], [sub, crowded ? "" : [pair.mode, pair.transport].filter(Boolean).join(" · "), 13]]) {
        // Label near the source, where ribbons have not crossed yet.
        node.setAttribute("x", x1 + 0.29 * (x2 - x1));
        node.setAttribute("y", y1 + 0.156 * (y2 - y1) + dy);
        text(node, value);
      }
    });
  }

  // ---------------------------------------------------------------- rooms and failures

  function between(room) {
    const names = [...new Set(room.endpoints.map(instanceOf))];
    return names.length > 3 ? `${names.slice(0, 3).join(", ")}, …` : names.join(", ");
  }
  function showRooms(id, none, rooms, cells) {
    sync($(id), rooms.slice(0, 12), (room) => room.room, (room) => row(cells(room)), (line, room) => {
      const values = cells(room);
      line.dataset.room = room.room;
      openable(line.children[0], short(room.room), () => showTrace(room.room)).title = room.room;
      values.slice(1).forEach(([className, value], place) => { line.children[place + 1].className = className; text(line.children[place + 1], value); });
    });
    $(none).hidden = rooms.length > 0;
  }
  function showFailures(view) {
    const make = () => {
      const item = element("li");
      const about = element("span", "about");
      about.append(element("button", "link"), element("span"));
      about.firstChild.type = "button";
      item.append(element("span", "code"), element("span", "why"), about);
      return item;
    };
    sync($("failures"), view.failures.slice(0, 8), (one) => `${one.room}@${one.endpoint}`, make, (item, one) => {
      const [code, why, about] = item.children;
      item.dataset.room = one.room;
      text(code, one.code);
      text(why, one.reason);
      text(about.firstChild, short(one.room));
      about.firstChild.onclick = () => showTrace(one.room);
      text(about.lastChild, ` · ${one.endpoint} · ${seconds(one.ago_s)} ago${one.request ? ` · ${one.request}` : ""}`);
    });
    $("no-failures").hidden = view.failures.length > 0;
  }
  function showWorkers(view) {
    $("workers-section").hidden = view.workers.length === 0;
    const cells = (one) => [["", one.name || one.url], ["", one.role], ["", one.model], ["n", one.max_in_flight ? `${one.in_flight} of ${one.max_in_flight}` : String(one.in_flight)], [one.up ? "up" : "down", one.up ? "up" : one.problem || "down"]];
    sync($("workers"), view.workers, (one) => one.url, (one) => row(cells(one)), (line, one) => { fill(line, cells(one)); line.lastChild.className = one.up ? "up" : "down"; line.dataset.worker = one.url; });
  }

  // ---------------------------------------------------------------- details

  function showDetail(title, facts, words) {
    text($("detail-title"), title);
    $("facts").replaceChildren(...facts.flatMap(([name, value]) => [element("dt", "", name), element("dd", "", value)]));
    $("picture").replaceChildren(element("p", "none", words));
    if (!$("detail").open) $("detail").showModal();
  }
  async function putPicture(path) {
    const response = await ask(path);
    const body = await response.text();
    if (!response.ok) { $("picture").replaceChildren(element("p", "none", message(body))); return; }
    const kind = response.headers.get("Content-Type").split(";")[0];
    const picture = new DOMParser().parseFromString(body, kind);
    $("picture").replaceChildren(document.importNode(picture.querySelector(".wf, svg"), true));
  }
  async function showPlan(pair) {
    showDetail(`${pair.source} → ${pair.target}`, [["transport", pair.transport], ["mode", pair.mode || "nothing sent yet"], ["links", `${pair.up} of ${pair.links} up`],
      ["now", rate(pair.rate)], ["total", bytes(pair.bytes)]], "Drawing the plan…");
    await putPicture(`kvferry/plan?source=${encodeURIComponent(pair.source)}&target=${encodeURIComponent(pair.target)}`);
  }
  async function showTrace(room) {
    showDetail(`Room ${room}`, [], "Collecting the trace from every endpoint…");
    await putPicture(`kvferry/traces/${encodeURIComponent(room)}?as=html`);
  }
  function message(body) { try { return JSON.parse(body).error.message; } catch { return "Not available at the moment."; } }

  // ---------------------------------------------------------------- requests

  function readToken() {
    const given = new URLSearchParams(location.hash.slice(1)).get("token");
    if (given) { sessionStorage.setItem("kvferry-token", given); window.history.replaceState(null, "", location.pathname); }
    return given || sessionStorage.getItem("kvferry-token") || "";
  }
  function ask(path) {
    return fetch(path, { headers: token ? { Authorization: `Bearer ${token}` } : {}, cache: "no-store", signal: AbortSignal.timeout(20000) });
  }
  function wantToken(why) {
    text($("token-why"), why);
    if (!$("ask").open) $("ask").showModal();
  }
  function show(view) {
    last = view;
    showFigures(view);
    showSpark(view);
    showMap(view);
    const all = pairs(view);
    showLinks(all);
    showRibbons(all);
    showRooms("open-rooms", "no-rooms", view.rooms, (room) => [["", ""], ["", room.status], ["n", seconds(room.seconds)], ["grow", between(room)]]);
    showRooms("slow-rooms", "no-slow", view.slow, (room) => [["", ""], ["", room.request || "–"], ["n", seconds(room.seconds)], ["grow", between(room)]]);
    showFailures(view);
    showWorkers(view);
    document.body.dataset.at = String(view.at);
  }
  async function poll() {
    if (document.hidden && last) return;
    try {
      const response = await ask("kvferry/cluster");
      if (response.status === 401) { wantToken(message(await response.text())); return; }
      if (!response.ok) throw new Error(message(await response.text()));
      if ($("ask").open) $("ask").close();
      show(await response.json());
      lastAt = Date.now();
      failedPolls = 0;
    } catch (error) {
      failedPolls += 1;
      if (failedPolls > 1) { $("problem").hidden = false; text($("problem"), `No response from ${location.host}: ${error.message}. The data shown is old.`); }
    }
    const live = $("live"), age = (Date.now() - lastAt) / 1000;
    live.className = `live${failedPolls > 2 ? " off" : failedPolls ? " old" : ""}`;
    text(live, !lastAt ? "no data yet" : failedPolls ? `${seconds(age)} old` : "live");
  }
  async function run() { for (;;) { await poll(); await new Promise((resolve) => setTimeout(resolve, POLL_MS)); } }

  // ---------------------------------------------------------------- events

  $("token-form").onsubmit = (event) => {
    event.preventDefault();
    token = $("token").value.trim();
    sessionStorage.setItem("kvferry-token", token);
    $("ask").close();
    poll();
  };
  $("detail").addEventListener("click", (event) => { if (event.target === $("detail")) $("detail").close(); });
  window.addEventListener("resize", () => { if (last) showRibbons(pairs(last)); });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
  run();
})();
