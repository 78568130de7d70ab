// One job: what happened to it and when, its text while it comes, and what can be done with it.

import { ADDRESS, api, save } from "./api.js";
import { count, milliseconds, percent, plural, seconds } from "./format.js";
import { act, badge, bar, confirmed, copyButton, draw, empty, facts, fromCode, h, heading, liveThing, modelLink, section, table, tenantLink, when } from "./parts.js";
import { ENDED, Growing, follow, keepEndInView, markAttempt } from "./stream.js";

const GROUPS = { queue: "wait", retries: "path", engine_wait: "wait", prefill: "engine", decode: "engine" };
const BURIED = new Set(["poison", "attempts_exhausted", "malformed_job"]);

export function job(page) {
  const { signal, id, go, title } = page;
  const answer = h("div", {});
  const text = h("div", { class: "transcript", owned: true, key: "text", role: "log", "aria-live": "off", "aria-label": "Answer", tabindex: 0 }, answer);
  const growing = new Growing(answer);
  keepEndInView(text, answer, () => (grows ? text.scrollHeight - text.scrollTop - text.clientHeight : 0), signal);
  const steps = h("section", {}), said = h("section", {});
  const columns = h("div", { class: "columns", key: "columns", owned: true }, steps, said);
  let following = false, grows = false, request = null, link = "";
  const round = liveThing(page, "Job", 1500, () => api.get(`/admin/jobs/${id}`, { signal }), (found, failure) => {
    title(`${found.status.replace("_", " ")} - Job`);
    if (found.readable && !following) { following = true; grows = !ENDED.has(found.status); read(); }
    return view(found, failure);
  }, "/console/jobs", "Show all jobs");

  function read() {
    follow(id, {
      event: (name, data) => {
        if (name === "delta" && data.index === 0) growing.add(data.text);
        else if (name === "stream.reset") { growing.clear(); growing.mark("the answer begins again here", { pending: true }); }
        else if (name === "started" || name === "interrupted") markAttempt(growing, name, data);
        if (name !== "delta") round();
      },
      lost: () => { link = "The connection broke. It is taken up again…"; },
      again: () => { link = ""; },
    }, signal);
    api.get(`/v1/jobs/${id}?include=input`, { signal }).then((found) => { request = found.input; round(); }, () => null);
  }

  async function cancel() {
    await act(() => api.post(`/admin/jobs/${id}/cancel`), (found) => found.already_ended ? `The job had already ended: ${found.status}.` : "The job is cancelled.");
    round();
  }

  async function replay() {
    if (!request || !(await confirmed("Run this request again?", "It becomes a new job. This one stays as it is.", "Run again"))) return;
    const made = await act(() => api.post("/v1/jobs", request), "A new job was queued.");
    if (made) go(`/console/jobs/${made.id}`);
  }

  /** The job with its attempts and its timing, and its request and its text if this key may read them. */
  function keep(found) {
    const whole = { ...found, ...(request && { request }), ...(found.readable && { text: growing.text }) };
    save(new Blob([JSON.stringify(whole, null, 2)], { type: "application/json" }), `${found.id}.json`);
  }

  function view(found, failure) {
    const ended = ENDED.has(found.status);
    draw(steps, h("h2", {}, "Timeline"), timeline(found));
    draw(said, h("h2", {}, "Answer"), link && h("p", { class: "dim" }, link), found.readable ? text : empty("Not for this key.", `Requests and answers are shown only to keys of tenant ${found.tenant}.`));
    answer.dataset.none = ended ? "It has no text." : "No text yet.";
    return [
      heading("Job", badge(found.status), found.finish_reasons.includes("length") && h("span", { class: "dim" }, "cut at its token limit"), h("code", { class: "id long" }, found.id), copyButton(found.id, "Copy id")),
      failure,
      h("div", { class: "actions" },
        !ended && h("button", { type: "button", class: "danger", onclick: cancel }, "Cancel"),
        found.readable && h("button", { type: "button", disabled: !request, onclick: replay }, "Run again"),
        h("button", { type: "button", onclick: () => keep(found) }, "Download as JSON")),
      why(found), fault(found), summary(found),
      columns,
      found.attempts > 0 || ended ? parts(found.timing) : null,
      request && h("details", { class: "code" }, h("summary", {}, "Request"), h("pre", { tabindex: 0, role: "region", "aria-label": "Request" }, JSON.stringify(request, null, 2))),
      fromCode(["Terminal", `penstock jobs show ${id}\npenstock jobs events ${id}\npenstock logs --job ${id}`],
        ["curl", `curl -N -H "Authorization: Bearer $KEY" ${ADDRESS}/v1/jobs/${id}/events`],
        ["Python", `from penstock.client import PenstockClient\n\nwith PenstockClient("${ADDRESS}", KEY) as client:\n    for event in client.stream("${id}"):\n        print(event.text, end="", flush=True)`]),
    ];
  }
}

function why(found) {
  if (found.status !== "queued") return null;
  const place = found.queue_position === null ? "It waits." : found.queue_position === 0 ? "It is next." : `${plural(found.queue_position, "job")} before it.`;
  const eta = found.eta_ms === null ? "How long is unknown." : `It starts in about ${milliseconds(found.eta_ms)}.`;
  return h("div", { class: "notice" }, h("p", { class: "strong" }, "Why it waits"), h("p", {}, `${place} ${eta} ${sentence(found.queue_reason ?? "")}`));
}

function sentence(words) {
  return words && `${words[0].toUpperCase()}${words.slice(1)}.`;
}

function fault(found) {
  return found.error && h("div", { class: found.status === "cancelled" ? "notice ended" : "notice bad" }, h("p", { class: "strong" }, found.error.code), h("p", {}, found.error.message),
    BURIED.has(found.error.code) && h("a", { href: "/console/dead-letters" }, "Open the dead letters"));
}

function summary(found) {
  const rows = [["Model", modelLink(found.model)], ["Endpoint", found.endpoint], ["Lane", found.priority], ["Tenant", tenantLink(found.tenant)], ["Attempts", found.attempts],
    ["Tokens", found.usage ? `${count(found.usage.prompt_tokens)} in, ${count(found.usage.completion_tokens)} out` : null],
    ["First token after", found.timing.time_to_first_token_ms && milliseconds(found.timing.time_to_first_token_ms)],
    ...Object.entries(found.metadata ?? {})];
  return facts(rows);
}

/** What happened, oldest first; an attempt that was lost or put back never folds. */
function timeline(found) {
  const steps = [{ at: found.created_at, what: "Queued", note: `on lane ${found.priority}`, tone: "wait" }];
  (found.attempt_log ?? []).forEach((one, number) => {
    const what = number ? "Continued on " : "Claimed by ";
    steps.push({ at: one.started_at, what, worker: one.worker, note: `attempt ${number + 1}`, tone: "run" });
    const tokens = one.tokens === null ? "" : `after ${plural(one.tokens, "token")}`;
    const end = { lost: [`${one.worker} was lost`, "bad"], preempted: ["Preempted for a job of a higher lane", "warn"], handed_back: [`Handed back by ${one.worker}`, "warn"], returned: [`The server of ${one.worker} was away`, "warn"] }[one.outcome];
    if (end) steps.push({ at: one.ended_at, what: end[0], note: tokens, tone: end[1] });
  });
  if (found.first_token_at) steps.push({ at: found.first_token_at, what: "First token", note: "", tone: "run" });
  if (found.completed_at) steps.push({ at: found.completed_at, what: found.status[0].toUpperCase() + found.status.slice(1), note: found.cancelled_by ? `${found.cancelled_by.replaceAll("_", " ")}` : found.error?.code ?? "", tone: { completed: "good", cancelled: "" }[found.status] ?? "bad" });
  steps.sort((one, other) => one.at - other.at);
  return h("ol", { class: "timeline" }, steps.map((step, number) => h("li", { class: step.tone, key: `${number} ${step.what}` },
    h("div", { class: "what" }, step.what, step.worker && modelLink(step.worker), step.note && h("span", { class: "dim" }, ` ${step.note}`)),
    h("div", { class: "dim" }, when(step.at, { relative: false }), number ? ` +${seconds(Math.max(0, step.at - steps[number - 1].at))}` : ""))));
}

/** Each part as a bar at its place in the request's time; a first token on its way is beside the engine's work. */
function parts(timing) {
  const known = Object.entries(timing.parts_ms).filter(([name, value]) => value !== null && name !== "egress_first");
  const total = known.reduce((sum, [, value]) => sum + Math.max(0, value), 0);
  if (!total) return null;
  let at = 0;
  const rows = known.map(([name, value]) => {
    const begins = at;
    at += Math.max(0, value);
    return [name, begins, value];
  });
  const first = timing.parts_ms.egress_first, behind = rows.findIndex(([name]) => name === "prefill") + 1;
  if (first !== null && behind) rows.splice(behind, 0, ["egress_first", rows[behind - 1][1] + rows[behind - 1][2], first]);
  return section("Where the time went", h("p", { class: "dim" }, `${milliseconds(total)} in all, ${plural(timing.attempts, "attempt")}.`),
    table("Time by part", [["Part", "head"], ["Time", "num"], ["Share", "num"], ["When"]], rows.map(([name, begins, value]) => [name, name.replaceAll("_", " "), milliseconds(value),
      name === "egress_first" ? h("span", { class: "dim" }, "beside") : percent(value / total), bar(begins / total, value / total, GROUPS[name] ?? "path")])));
}
