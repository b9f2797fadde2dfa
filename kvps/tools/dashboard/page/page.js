// The dashboard: shows each document that the scheduler sends, and computes nothing but positions and widths.
// Every text of a peer becomes a text node. A shown value carries its path in the document and the value itself.

import * as format from "./format.js";

const HISTORY_MAX = 600;
const STALE_MS = 4000;
const AGAIN_MS = 2000;
const COLORS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];
const $ = (id) => document.getElementById(id);
const state = { document: null, at: 0, history: null, charts: [], token: sessionStorage.getItem("kvps-token") || "" };

// --- elements -----------------------------------------------------------------------------------

function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function lookup(path) {
  return path.split(".").reduce((part, name) => (part === null || part === undefined ? part : part[name]), state.document);
}

function value(path, as, tag = "span", attributes = {}) {
  const raw = lookup(path);
  const element = h(tag, { ...attributes, "data-path": path, "data-as": as }, format[as](raw));
  element.dataset.value = JSON.stringify(raw === undefined ? null : raw);
  return element;
}

function bar(part, level = "") {
  const fill = h("i", { class: level });
  fill.style.width = `${Math.min(100, Math.max(0, part * 100)).toFixed(1)}%`;
  return h("span", { class: "bar" }, fill);
}

function empty(text) {
  return h("p", { class: "empty" }, text);
}

const each = (list, draw) => (list || []).map((item, index) => draw(item, index));

// --- panels -------------------------------------------------------------------------------------

function drawHead(now) {
  const held = now.phase === "running" ? "good" : now.phase === "forming" ? "warn" : "bad";
  $("phase").className = `pill ${held}`;
  $("phase").textContent = now.phase;
  $("job").textContent = `job ${now.job}`;
  document.title = `kvps: ${now.phase}`;
}

function drawFindings(now) {
  const found = now.findings.slice(0, 6);
  const more = now.findings.length - found.length;
  $("findings").replaceChildren(
    ...(found.length
      ? each(found, (one) => {
          const link = h("a", { class: `finding ${one.level}`, href: `#${one.topic}` }, [one.text, one.advice].filter(Boolean).join(" "));
          return link;
        })
      : [h("p", { class: "finding ok" }, "All is well: every member is here, and no figure is out of its range.")]),
    more > 0 ? h("p", { class: "muted" }, `and ${more} more`) : "",
  );
}

function figure(label, content, note) {
  return h("div", { class: "figure" }, h("span", { class: "label" }, label), content, h("span", { class: "note" }, note || ""));
}

function drawFigures(now) {
  const of = (role) => now.members.filter((one) => one.role === role);
  const held = (role) => of(role).filter((one) => one.state === "held").length;
  const stores = new Map();
  for (const server of now.servers) for (const one of server.stores) stores.set(one.store, Math.max(one.version, stores.get(one.store) || 0));
  const newest = [...stores].map(([name, version]) => `${name}: ${format.count(version)}`).slice(0, 2).join(", ");
  $("figures").replaceChildren(
    figure(now.totals.has_rounds ? "Rounds" : "Pushes", value("totals.rounds_per_s", "rate", "strong"), newest),
    figure("Round p50", value("totals.round_p50_s", "seconds", "strong"), "last 30 s"),
    figure("Round p99", value("totals.round_p99_s", "seconds", "strong"), "last 30 s"),
    figure("Into servers", value("totals.in_bytes_per_s", "bytesRate", "strong"), "gradients"),
    figure("Out of servers", value("totals.out_bytes_per_s", "bytesRate", "strong"), "weights"),
    figure("Workers", h("strong", {}, `${held("worker")} / ${of("worker").length}`), "held"),
    figure("Servers", h("strong", {}, `${held("server")} / ${of("server").length}`), "held"),
    figure("Checkpoint", value("checkpoints.kept_age_s", "seconds", "strong"), now.checkpoints.kept ? `number ${now.checkpoints.kept}` : "none yet"),
  );
}

function drawMembers(now) {
  $("members").replaceChildren(
    ...each(now.members, (one, index) => {
      const at = `members.${index}`;
      const where = one.state === "empty" ? "–" : `${one.host}:${one.pid}`;
      return h("tr", { "data-member": `${one.role} ${one.rank}` },
        h("td", {}, h("b", {}, `${one.role} ${one.rank}`)),
        h("td", {}, h("span", { class: `dot ${one.state}` }), value(`${at}.state`, "text")),
        value(`${at}.presence`, "text", "td", { class: "grow" }),
        h("td", { class: "mono" }, where),
        value(`${at}.held_s`, "seconds", "td"),
        value(`${at}.software`, "text", "td"),
        value(`${at}.incarnation`, "count", "td"));
    }),
  );
}

function levelOf(now, member) {
  const found = now.findings.find((one) => one.members.includes(member) && one.level !== "info");
  return found ? found.level : "";
}

function drawWorkers(now) {
  const most = Math.max(0.001, ...now.workers.map((one) => one.lateness_s || 0));
  $("lateness").replaceChildren(
    ...each(now.workers, (one, index) => {
      const at = `workers.${index}`, waits = one.waited_s !== null && one.waited_s >= 1;
      const level = levelOf(now, `worker ${one.rank}`);
      return h("div", { class: "row", "data-worker": one.rank },
        h("div", { class: "line" }, h("b", {}, `worker ${one.rank}`), bar((one.lateness_s || 0) / most, level), value(`${at}.lateness_s`, "seconds", "span", { class: "amount" })),
        h("div", { class: "sub" }, value(`${at}.presence`, "text"), " · ", value(`${at}.bytes_per_s`, "bytesRate"),
          one.link === null ? null : h("span", {}, " · link to server ", value(`${at}.link.server`, "count"), " busy ", value(`${at}.link.share`, "share")),
          !waits ? null : h("span", { class: "bad" }, " · an open round waits for it for ", value(`${at}.waited_s`, "seconds"))));
    }),
    now.workers.some((one) => one.lateness_s !== null) || !now.workers.length ? "" : empty("No rounds in the last 30 s: asynchronous stores have none, and a job that waits closes none."),
  );
}

function drawServers(now) {
  $("server-rows").replaceChildren(
    ...each(now.servers, (one, index) => {
      const at = `servers.${index}`, level = levelOf(now, `server ${one.rank}`);
      return h("div", { class: "row", "data-server": one.rank },
        h("div", { class: "line" }, h("b", {}, `server ${one.rank}`), bar(one.memory_share || 0, level),
          h("span", { class: "amount" }, value(`${at}.memory_bytes`, "bytes"), " of ", one.memory_limit_bytes === null ? "no limit" : value(`${at}.memory_limit_bytes`, "bytes"))),
        h("div", { class: "sub" }, "answers in ", value(`${at}.answer_s`, "seconds", "span", { class: level }), " · ",
          value(`${at}.traffic_share`, "share"), " of the traffic · in ", value(`${at}.in_bytes_per_s`, "bytesRate"), " · out ", value(`${at}.out_bytes_per_s`, "bytesRate"),
          one.link_share === null ? null : h("span", {}, " · links busy ", value(`${at}.link_share`, "share")), " · p99 ", value(`${at}.round_p99_s`, "seconds"), " · ", value(`${at}.pending_requests`, "count"), " requests wait"));
    }),
    now.servers.length ? "" : empty("No server has sent its figures yet."),
  );
}

function drawFaults(now) {
  $("fault-list").replaceChildren(
    ...each(now.faults.slice(0, 8), (one) =>
      h("article", { class: `fault ${one.is_over ? "over" : "open"}` },
        h("h3", {}, h("span", {}, `${one.member} lost`), h("span", { class: "muted" }, clock(one.age_s)), h("span", { class: `pill ${one.is_over ? "good" : "bad"}` }, one.is_over ? `over after ${format.seconds(one.lasted_s)}` : `open for ${format.seconds(one.lasted_s)}`)),
        h("p", { class: "sub" }, one.reason),
        h("ol", {}, ...each(one.steps, (step) => h("li", {}, h("span", { class: "after" }, `+${format.seconds(step.after_s)}`), step.text))))),
    now.faults.length ? "" : empty("No member was lost since the scheduler began."),
    now.totals.short_rounds ? h("p", { class: "sub" }, value("totals.short_rounds", "count"), " rounds closed without a lost worker") : "",
  );
}

function drawKeys(now) {
  const most = Math.max(1e-9, ...now.keys.map((one) => one.share));
  $("key-rows").replaceChildren(
    ...each(now.keys, (one, index) => {
      const at = `keys.${index}`;
      const others = one.others ? ` and ${format.count(one.others)} more` : "";
      return h("tr", {}, h("td", { class: "key" }, one.key, h("span", { class: "muted" }, others)), value(`${at}.server`, "count", "td"),
        value(`${at}.moved_bytes`, "bytes", "td", { class: "number" }), value(`${at}.bytes_per_s`, "bytesRate", "td", { class: "number" }),
        h("td", { class: "sharing" }, bar(one.share / most), value(`${at}.share`, "share", "span", { class: "amount" })));
    }),
  );
}

function drawPublications(now) {
  $("publication-rows").replaceChildren(
    ...each(now.publications, (one, index) => {
      const at = `publications.${index}`;
      const readers = Object.entries(one.readers).map(([version, count]) => `${format.count(count)} at ${version}`).join(", ");
      return h("tr", {}, h("td", { class: "key" }, one.name), value(`${at}.version`, "count", "td", { class: "number" }),
        value(`${at}.age_s`, "seconds", "td", { class: "number" }), value(`${at}.size`, "bytes", "td", { class: "number" }), h("td", {}, readers || "none"));
    }),
  );
}

function drawHotRows(now) {
  $("hot-rows").replaceChildren(
    ...each(now.hot_rows, (one) => {
      const most = Object.entries(one.uses).sort((left, right) => right[1] - left[1]);
      return h("tr", {}, h("td", { class: "key" }, one.table), h("td", {}, one.store), h("td", {}, most.map(([id, uses]) => `${id}: ${format.count(uses)}`).join(", ")));
    }),
  );
}

function pairs(...rows) {
  return rows.flatMap(([name, content]) => [h("dt", {}, name), h("dd", {}, content)]);
}

function drawCheckpoints(now) {
  const ours = now.checkpoints, sum = (name) => now.servers.reduce((total, one) => total + one[name], 0);
  $("checkpoint-figures").replaceChildren(...pairs(
    ["Newest complete", ours.kept ? value("checkpoints.kept", "count") : "none"],
    ["Its age", value("checkpoints.kept_age_s", "seconds")],
    ["It took", ours.kept ? value("checkpoints.took_s", "seconds") : "–"],
    ["Interval", ours.every_s === null ? "servers have no --checkpoint-dir" : ours.every_s ? value("checkpoints.every_s", "seconds") : "when a script asks"],
    ["Now", ours.stage || "idle"],
    ["Written by servers", `${format.count(sum("snapshots_written"))} parts, ${format.bytes(sum("snapshot_bytes"))}`],
    ["Failed", format.count(sum("snapshots_failed"))],
    ["Rollbacks", value("epoch", "count")]));
}

function drawCompression(now) {
  const way = (name) => now.compression[name].bytes
    ? h("span", {}, value(`compression.${name}.ratio`, "ratio", "b"), " · ", value(`compression.${name}.uncompressed_bytes`, "bytes"), " as ", value(`compression.${name}.bytes`, "bytes"))
    : "not compressed";
  $("compression-figures").replaceChildren(...pairs(["Gradients, to servers", way("in")], ["Weights, to workers", way("out")]));
}

function drawStaleness(now) {
  const { bounds, counts, pushes } = now.staleness;
  const names = bounds.map((bound, index) => (index && bound - bounds[index - 1] > 1 ? `${bounds[index - 1] + 1}–${bound}` : `${bound}`));
  names.push(`>${bounds[bounds.length - 1]}`);
  const most = Math.max(1, ...counts), last = Math.max(5, counts.findLastIndex((one) => one > 0));
  $("staleness-bars").replaceChildren(
    ...(pushes
      ? each(counts.slice(0, last + 1), (one, index) => {
          const column = h("i", { title: `${one} pushes` });
          column.style.height = `${((one / most) * 100).toFixed(1)}%`;
          return h("div", { class: "column" }, value(`staleness.counts.${index}`, "count", "span", { class: "top" }), h("div", { class: "stem" }, column), h("span", {}, names[index]));
        })
      : [empty("No stale pushes are possible: all stores are synchronous, or none was pushed to after a pull.")]),
  );
}

function clock(age) {
  return new Date(state.at - age * 1000).toLocaleTimeString("en-GB");
}

function drawEvents(now) {
  $("events").replaceChildren(...each(now.events.slice(0, 40), (one) =>
    h("li", { class: one.level }, h("time", {}, clock(one.age_s)), h("span", { class: "level" }, one.level), h("span", {}, one.text))));
}

const PANELS = [drawHead, drawFindings, drawFigures, drawMembers, drawWorkers, drawServers, drawFaults, drawKeys, drawPublications, drawHotRows, drawCheckpoints, drawCompression, drawStaleness, drawEvents];

// --- charts -------------------------------------------------------------------------------------

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function chart(id, series, as) {
  const box = $(id), axis = { stroke: color("--muted"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const options = {
    width: box.clientWidth, height: 180, cursor: { points: { size: 6 } }, legend: { live: true },
    scales: { x: { time: true }, y: { range: (_, low, high) => [0, (high || 1) * 1.1] } },
    axes: [{ ...axis, size: 30, space: 70, values: (_, ticks) => ticks.map((tick) => new Date(tick * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" })) },
      { ...axis, size: 78, values: (_, ticks) => ticks.map((tick) => format[as](tick)) }],
    series: [{ label: "", value: () => "" }, ...series.map((one, index) => ({
      label: one.label, stroke: color(COLORS[index % COLORS.length]), width: 2, spanGaps: false, points: { show: false },
      fill: series.length === 1 ? color("--fill") : undefined, value: (_, now) => format[as](now) }))],
  };
  const made = new uPlot(options, [[], ...series.map(() => [])], box);
  new ResizeObserver(() => made.setSize({ width: box.clientWidth, height: 180 })).observe(box);
  return { made, series };
}

function drawCharts() {
  const past = state.history;
  if (!past) return;
  const ranks = Object.keys(past.servers);
  const key = `${document.documentElement.dataset.theme}|${matchMedia("(prefers-color-scheme: dark)").matches}|${ranks}`;
  if (state.charts.key !== key) {
    for (const one of state.charts) one.made.destroy();
    state.charts = [
      chart("chart-rounds", [{ label: "rounds", of: () => state.history.rounds_per_s }], "rate"),
      chart("chart-latency", [{ label: "p50", of: () => state.history.p50_s }, { label: "p99", of: () => state.history.p99_s }], "seconds"),
      chart("chart-traffic", ranks.map((rank) => ({ label: `server ${rank}`, of: () => state.history.servers[rank] })), "bytesRate"),
    ];
    state.charts.key = key;
  }
  for (const { made, series } of state.charts) {
    made.setData([past.at, ...series.map((line) => line.of())]);
    if (made.cursor.idx === null || made.cursor.idx === undefined) made.setLegend({ idx: past.at.length - 1 });
  }
}

function remember(now) {
  const past = state.history;
  if (!past || past.sample >= now.sample) return;
  past.sample = now.sample;
  past.at.push(state.at / 1000);
  past.rounds_per_s.push(now.totals.rounds_per_s);
  past.p50_s.push(now.totals.round_p50_s);
  past.p99_s.push(now.totals.round_p99_s);
  const moved = new Map(now.servers.slice(0, 16).map((one) => [String(one.rank), one.in_bytes_per_s + one.out_bytes_per_s]));
  for (const rank of moved.keys()) past.servers[rank] ||= past.at.slice(1).map(() => null);
  for (const [rank, line] of Object.entries(past.servers)) line.push(moved.has(rank) ? moved.get(rank) : null);
  for (const line of [past.at, past.rounds_per_s, past.p50_s, past.p99_s, ...Object.values(past.servers)]) {
    if (line.length > HISTORY_MAX) line.shift();
  }
}

// --- what comes in ------------------------------------------------------------------------------

function show(now) {
  state.document = now;
  state.at = Date.now();
  remember(now);
  for (const draw of PANELS) draw(now);
  drawCharts();
  document.body.dataset.sample = now.sample;
  tick();
}

function tick() {
  const still = Date.now() - state.at, stale = state.document !== null && still > STALE_MS;
  document.body.classList.toggle("stale", stale || (state.document !== null && !state.document.live));
  $("clock").textContent = state.document === null ? "" : stale ? `no news for ${format.seconds(still / 1000)}` : "live";
}

const headers = () => (state.token ? { Authorization: `Bearer ${state.token}` } : {});

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value: more } = await reader.read();
    if (done) return;
    const parts = (rest + more).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
  }
}

async function follow() {
  const answer = await fetch("/events", { headers: headers(), cache: "no-store" });
  if (answer.status === 401) {
    $("denied").hidden = !state.token;
    $("login").hidden = false;
    $("board").hidden = true;
    return false;
  }
  if (!answer.ok) throw new Error(`${answer.status}`);
  $("login").hidden = true;
  $("board").hidden = false;
  const past = await (await fetch("/history", { headers: headers() })).json();
  const end = Date.now() / 1000;
  state.history = { ...past, at: past.age_s.map((age) => end - age), sample: past.sample };
  for await (const now of events(answer.body)) show(now);
  return true;
}

async function main() {
  for (;;) {
    try {
      if (!(await follow())) return;
    } catch (error) {
      if (!(error instanceof TypeError) && !/^\d+$/.test(error.message)) throw error;
    }
    await new Promise((done) => setTimeout(done, AGAIN_MS));
  }
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  state.token = $("token").value;
  sessionStorage.setItem("kvps-token", state.token);
  main();
});

const THEMES = ["auto", "light", "dark"];
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  localStorage.setItem("kvps-theme", name);
  $("theme").textContent = { auto: "Auto", light: "Light", dark: "Dark" }[name];
  drawCharts();
}
$("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % 3]));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
setTheme(THEMES.includes(localStorage.getItem("kvps-theme")) ? localStorage.getItem("kvps-theme") : "auto");
setInterval(tick, 500);
main();
