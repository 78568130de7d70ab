// Overview: whether jobs flow, what is wrong, and the numbers behind it; one request every two seconds.
// Models: what each can do, its engine, and the workers that serve it.

import { ADDRESS, api } from "./api.js";
import { bytes, count, milliseconds, plural, rate, seconds } from "./format.js";
import { LANES, badge, chart, empty, facts, fromCode, h, heading, live, livePage, modelLink, section, table, tile, when } from "./parts.js";

export function models(page) {
  let named = decoded(location.hash.slice(1)); // a model or a worker: it is scrolled to once
  const read = () => Promise.all(["/admin/pools", "/v1/models"].map((path) => api.get(path, { signal: page.signal })));
  livePage(page, "Models", 3000, read, ([pools, cards]) => {
    if (named) requestAnimationFrame(() => { document.getElementById(named)?.scrollIntoView({ block: "center" }); named = ""; });
    return pools.data.map((pool) => model(pool, cards.data.find(({ id }) => id === pool.model) ?? {}));
  });
}

/** Decodes a part of the address, which anybody may have written: text with malformed escapes stays as it is. */
function decoded(text) {
  try { return decodeURIComponent(text); } catch { return text; }
}

function model(pool, card) {
  const can = Object.entries(card.capabilities ?? {}).filter(([, value]) => value === true).map(([name]) => name.replaceAll("_", " "));
  const rows = [["Engine", pool.engine], ["Context", card.context_length ? `${count(card.context_length)} tokens` : "unknown until a worker has loaded it"],
    ["Workers", `${pool.ready} ready, ${pool.starting} starting; ${pool.want ?? "–"} wanted, ${pool.min} to ${pool.max}`],
    ["Why", pool.reason ?? "no scheduler has decided yet"],
    ["Cold start", pool.cold_start_s === null ? "–" : seconds(pool.cold_start_s)], ["Can", can.join(", ") || "–"],
    ["Set by hand", pool.override ? `${pool.override.paused ? "scaling is paused" : `${pool.override.want} workers`}, by ${pool.override.by || "an operator"}` : "no"]];
  const part = section(pool.model,
    facts(rows, ["Why", "Can"]),
    pool.workers.length ? table(`Workers of ${pool.model}`, [["Worker"], ["State"], ["Slots", "num"], ["Engine step", "num"], ["Started"], ["Host", null, "dim"], ["Note"]], pool.workers.map((worker) => [`${worker.id} ${worker.host} ${worker.since}`,
      h("th", { scope: "row", id: worker.id }, worker.id), badge(worker.away?.length ? "server away" : worker.state), `${worker.running} of ${worker.slots}`,
      milliseconds(worker.step_ms), when(worker.since), worker.host, worker.cordon ?? ""]))
      : h("p", { class: "dim" }, "No worker runs now."),
    fromCode(["Terminal", `penstock scale set ${pool.model} 2 --for 1h\npenstock scale resume ${pool.model}`]));
  part.key = pool.model;
  part.id = pool.model;
  return part;
}

const FLOW = { flowing: ["good", "✓"], behind: ["warn", "!"], stopped: ["bad", "✕"], unknown: ["dim", "?"] };
const EVERY_MS = 2000;

export function overview(page) {
  const points = new Map();
  live(page, "Overview", EVERY_MS, () => api.get("/admin/overview", { signal: page.signal }), (now, failure) => {
    if (!now) return [heading("Overview"), failure];
    for (const point of now.history) points.set(point.at, point);
    for (const at of [...points.keys()].slice(0, -150)) points.delete(at);
    const history = [...points.values()].sort((one, other) => one.at - other.at);
    page.title(failure ? "Unknown" : `${now.verdict.title.split(":")[0].replace(".", "")} - Overview`);
    return [heading("Overview"), verdict(now, failure), tiles(now, history), lanes(now), pools(now), decisions(now), processes(now), code()];
  });
}

function verdict(now, failure) {
  if (failure) return [h("div", { class: "verdict dim" }, h("span", { class: "sign", "aria-hidden": "true" }, "?"), h("p", { class: "strong" }, "Unknown: the server does not answer.")), failure];
  const [tone, sign] = FLOW[now.verdict.flow];
  return h("div", { class: `verdict ${tone}` },
    h("span", { class: "sign", "aria-hidden": "true" }, sign),
    h("div", {}, h("p", { class: "strong" }, now.verdict.title),
      now.verdict.problems.length > 0 && h("ul", { class: "problems" }, now.verdict.problems.map((problem) =>
        h("li", {},
          h("span", { class: `mark ${problem.severity}` }, problem.severity),
          h("span", {}, problem.page ? h("a", { href: `/console${problem.page}` }, problem.title) : problem.title, `: ${problem.cause}.`),
          h("span", { class: "dim" }, "To do: ", problem.next_step))))));
}

function tiles(now, history) {
  const { rates } = now, last = history.at(-1);
  const window = rates.window_s === null ? "since the start" : `in the last ${seconds(Math.round(rates.window_s))}`;
  const values = (name) => history.map((point) => [point.at, point[name]]);
  const marks = now.actions.filter(({ action }) => action !== "lead").map((one) => [one.at, `${one.model ?? "all"} ${one.action}${one.worker ? ` ${one.worker}` : ""}: ${one.reason}`]);
  const plot = (name, sentence, text) => chart(values(name), sentence, { text, marks });
  const pair = (found) => (found ? [milliseconds(found.p50), `95 % below ${milliseconds(found.p95)}, ${window.replace("in the ", "")}`] : ["–", `no answer ${window}`]);
  const [first, firstNote] = pair(rates.first_token_ms), [between, betweenNote] = pair(rates.per_token_ms);
  return h("div", { class: "tiles" },
    tile("Tokens per second", rate(rates.tokens_per_s), plural(rates.open_streams, "open stream"), plot("tokens_per_s", `Tokens per second, now ${rate(rates.tokens_per_s)}`, rate)),
    tile("Time to first token", first, firstNote, plot("first_token_ms", `Median time to first token, now ${first}`, milliseconds)),
    tile("Time between tokens", between, betweenNote, plot("per_token_ms", `Median time between tokens, now ${between}`, milliseconds)),
    tile("Waiting", count(last?.waiting), `${count(last?.running)} running, ${rate(rates.jobs_per_s)} end per second`, plot("waiting", `Waiting jobs, now ${last?.waiting}`, count)));
}

function lanes(now) {
  const rows = now.pools.flatMap((pool) => LANES.map((name) => {
    const lane = pool.lanes[name], link = `/console/jobs?lane=${name}&model=${encodeURIComponent(pool.model)}&tenant=*`;
    return [`${pool.model} ${name}`, [name, h("div", { class: "narrow dim" }, pool.model)], modelLink(pool.model),
      h("a", { href: `${link}&status=queued` }, count(lane.waiting)), h("a", { href: `${link}&status=in_progress` }, count(lane.running)),
      lane.waiting ? seconds(lane.oldest_s) : "–", lane.wait_s === null ? "unknown" : seconds(lane.wait_s)];
  }));
  return section("Lanes", table("Waiting and running jobs of each lane", [["Lane", "head"], ["Model", "wide"], ["Waiting", "num"], ["Running", "num"], ["Oldest", "num"], ["A new job waits", "num"]], rows));
}

function pools(now) {
  return section("Pools of workers", h("div", { class: "cards" }, now.pools.map((pool) => h("div", { class: "card", key: pool.model },
    h("h3", {}, modelLink(pool.model)),
    h("p", {}, h("span", { class: "big" }, `${pool.ready}`), ` of ${pool.want ?? "–"} wanted ready`, pool.starting ? `, ${pool.starting} starting` : "", pool.draining ? `, ${pool.draining} draining` : ""),
    h("p", { class: "dim" }, pool.reason ? `Why: ${pool.reason}.` : "No scheduler has decided yet.")))));
}

function decisions(now) {
  const rows = now.actions.slice(0, 8).map((action) => [`${action.at} ${action.action} ${action.model} ${action.worker}`, when(action.at), action.model ? modelLink(action.model) : "all",
    [action.action, action.want !== null && action.was !== null ? ` ${action.was} → ${action.want}` : action.want !== null ? ` ${action.want}` : "", action.worker && [" ", modelLink(action.worker)]],
    action.reason, h("td", { class: "dim wide", title: action.by }, action.by.split("@")[0])]);
  const leader = now.leader ? `${now.leader.id.split("@")[0]} leads.` : "No scheduler leads: nothing is changed.";
  return section("Last decisions", h("p", { class: "dim" }, leader), rows.length
    ? table("Last decisions of the scheduler, and their reasons", [["When"], ["Model", null, "name"], ["Decision"], ["Reason"], ["By", "wide"]], rows)
    : empty("Nothing was decided yet.", "The scheduler writes here when it starts or stops workers."));
}

function processes(now) {
  const rows = now.processes.map((one) => [`${one.role} ${one.id} ${one.host} ${one.pid} ${one.since}`,
    one.role === "worker" ? modelLink(one.id) : one.id, one.role, badge(one.away?.length ? "server away" : one.state), one.model ? modelLink(one.model) : "–",
    one.slots === null ? "–" : `${one.running} of ${one.slots}`, one.kv_tokens ? `${Math.round((100 * (one.kv_used ?? 0)) / one.kv_tokens)} %` : "–",
    when(one.since), `${one.host}, pid ${one.pid}`]);
  const { store } = now;
  const memory = store.share === null ? `The store uses ${bytes(store.used_bytes)}, without a limit.`
    : `The store uses ${bytes(store.used_bytes)} of ${bytes(store.allowed_bytes)}: ${Math.round(100 * store.share)} % of what jobs may use.`;
  return section("Processes", h("p", { class: "dim" }, memory), table("Running processes", [["Process", "head"], ["Role", "wide"], ["State"], ["Model", null, "name"], ["Slots", "num"], ["KV cache", "num"], ["Started"], ["Where", null, "dim where"]], rows));
}

function code() {
  return fromCode(["Terminal", "penstock ps\npenstock scale status"],
    ["curl", `curl -H "Authorization: Bearer $KEY" ${ADDRESS}/admin/overview`]);
}
