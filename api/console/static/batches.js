// Batches: upload a file of requests, watch it, download its answers. One batch: how far it is, which lines were refused
// and why, and what can be done with it.

import { ADDRESS, api, download } from "./api.js";
import { count, plural, rate, seconds, shortId } from "./format.js";
import { act, badge, confirmed, copyButton, empty, facts, fromCode, h, heading, livePage, liveThing, modelLink, section, select, table, when } from "./parts.js";
import { ENDED } from "./stream.js";

export function batch(page) {
  const { id, signal, title } = page;
  const round = liveThing(page, "Batch", 2000, () => api.get(`/v1/batches/${id}`, { signal }), (found, failure) => {
    title(`${stateOf(found)} - Batch`);
    return [heading("Batch", badge(stateOf(found)), h("code", { class: "id long" }, found.id), copyButton(found.id, "Copy id")),
      failure,
      h("div", { class: "actions" }, actionsOf(found, round)),
      h("section", { class: "card" }, progressOf(found)),
      summary(found), faults(found), codeOf(id)];
  }, "/console/batches", "Show all batches");
}

function summary(found) {
  const { failed: bad } = found.request_counts, ended = found.completed_at ?? found.failed_at ?? found.expired_at ?? found.cancelled_at;
  const rows = [["Model", found.model && modelLink(found.model)], ["Endpoint", found.endpoint], ["Lane", found.lane && `${found.lane}${found.lane_reason ? ` (${found.lane_reason})` : ""}`], ["Window", found.completion_window],
    ["Lines that failed", bad ? h("span", { class: "warn-text" }, count(bad)) : null],
    ["Pace", ENDED.has(found.status) ? null : `${rate(found.lines_per_second)}/s`],
    ["In the queue", ENDED.has(found.status) ? null : plural(found.lines_in_queue, "line")],
    ["Tokens", `${count(found.usage.input_tokens)} in, ${count(found.usage.output_tokens)} out`],
    ["Created", when(found.created_at)], ["Began", found.in_progress_at && when(found.in_progress_at)], ["Ended", ended && when(ended)],
    ["Window ends", !ended && found.expires_at ? h("time", { datetime: new Date(found.expires_at * 1000).toISOString() }, new Date(found.expires_at * 1000).toLocaleString("en-GB")) : null],
    ...Object.entries(found.metadata ?? {})];
  return facts(rows);
}

/** Why the file was refused, by line. */
function faults({ errors }) {
  if (!errors?.data.length) return null;
  return section("Why it was refused", table("Refused lines", [["Line", "num"], ["Field"], ["Code"], ["Message"]], errors.data.map((one, number) => [number, one.line ?? "–", one.param ?? "–", one.code, one.message])));
}

function codeOf(id) {
  return fromCode(["Terminal", `penstock batch show ${id}\npenstock batch output ${id} > answers.jsonl\npenstock batch errors ${id}`],
    ["curl", `curl -H "Authorization: Bearer $KEY" ${ADDRESS}/v1/batches/${id}`]);
}

const URLS = ["/v1/chat/completions", "/v1/completions", "/v1/responses"];

export function batches(page) {
  let problem = "", sending = false;
  const read = () => api.get("/v1/batches?limit=50", { signal: page.signal });
  const round = livePage(page, "Batches", 2000, read, ({ data }) => [upload(), list(data), code()]);

  async function send(event) {
    event.preventDefault();
    const form = event.target, file = form.elements.file.files[0];
    problem = file ? "" : "Choose a file of JSON lines.";
    if (!file) { form.elements.file.focus(); round(); return; }
    sending = true;
    round();
    try {
      const endpoint = endpointOf(await file.slice(0, 65536).text());
      const parts = new FormData();
      parts.set("purpose", "batch");
      parts.set("file", file);
      const stored = await api.post("/v1/files", parts);
      await api.post("/v1/batches", { input_file_id: stored.id, endpoint, completion_window: form.elements.window.value });
      form.reset();
      await act(async () => null, "The batch is accepted.");
    } catch (error) {
      problem = error.message;
    }
    sending = false;
    round();
  }

  function upload() {
    return h("form", { class: "card filters", onsubmit: send, novalidate: true },
      h("label", { class: "field grow" }, h("span", {}, "File of requests (JSON lines)"),
        h("input", { type: "file", name: "file", accept: ".jsonl,.json,.txt", "aria-describedby": "upload-error" })),
      select("window", "Window", [["24h", "24 hours"], ["1h", "1 hour"], ["15m", "15 minutes"], ["none", "none"]], "24h"),
      h("button", { class: "primary", type: "submit", disabled: sending }, sending ? "Sending…" : "Run as a batch"),
      h("p", { id: "upload-error", class: "bad-text", role: "alert" }, problem));
  }

  function list(all) {
    if (!all.length) return empty("No batch yet.", "Each line of the file is a request: ", h("code", {}, '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}'));
    return section("Your batches", table("Batches, newest first", [["State"], ["Batch"], ["Progress"], ["Failed", "num"], ["Pace", "num"], ["Created"], ["Actions"]], all.map(row)));
  }

  function row(batch) {
    const { failed: bad } = batch.request_counts, name = shortId(batch.id);
    const link = h("a", { class: "id", href: `/console/batches/${batch.id}`, title: batch.id, "data-row": true }, name);
    return [batch.id, badge(stateOf(batch)), link, progressOf(batch), bad ? h("span", { class: "warn-text" }, count(bad)) : 0,
      ENDED.has(batch.status) ? "–" : `${rate(batch.lines_per_second)}/s`, when(batch.created_at), h("div", { class: "actions tight" }, actionsOf(batch, round, "small"))];
  }
}

/** The state that a reader cares for: a batch that is paused goes nowhere, whatever it was doing. */
export function stateOf(batch) {
  return batch.paused && !ENDED.has(batch.status) ? "paused" : batch.status;
}

function leftOf({ status, request_counts: { total, completed, failed: bad }, lines_per_second: pace }) {
  return !ENDED.has(status) && pace > 0 ? `, about ${seconds((total - completed - bad) / pace)} left` : "";
}

export function progressOf(batch) {
  const { total, completed, failed: bad } = batch.request_counts, done = completed + bad;
  return [h("progress", { max: Math.max(1, total), value: done, "aria-label": `Progress of ${shortId(batch.id)}` }),
    h("div", { class: "dim" }, `${count(done)} of ${count(total)}${leftOf(batch)}`)];
}

/** The buttons of a batch; `round` reads it anew. */
export function actionsOf(batch, round, size = "") {
  const { total, completed, failed: bad } = batch.request_counts, name = shortId(batch.id), ended = ENDED.has(batch.status);
  const steer = (verb, said) => act(() => api.post(`/v1/batches/${batch.id}/${verb}`), said).then(round);
  const stop = async () => (await confirmed("Cancel this batch?", `${plural(total - completed - bad, "line")} will not be computed; finished lines are kept.`, "Cancel batch")) && steer("cancel", "The batch is cancelled.");
  const button = (label, onclick, { danger = false, spoken = null } = {}) => h("button", { type: "button", class: `${size} ${danger ? "danger" : ""}`.trim(), onclick, "aria-label": spoken }, label);
  return [
    completed > 0 && button("Answers", () => act(() => download(`/v1/batches/${batch.id}/output`, `${batch.id}.jsonl`)), { spoken: `Answers of ${name}` }),
    bad > 0 && button("Errors", () => act(() => download(`/v1/batches/${batch.id}/errors`, `${batch.id}.errors.jsonl`)), { spoken: `Errors of ${name}` }),
    !ended && button(batch.paused ? "Go on" : "Pause", () => (batch.paused ? steer("resume", "The batch goes on.") : steer("pause", "The batch is paused.")), { spoken: `${batch.paused ? "Go on with" : "Pause"} ${name}` }),
    !ended && button("Cancel", stop, { danger: true, spoken: `Cancel ${name}` }),
  ];
}

/** The endpoint that the first line names. */
function endpointOf(text) {
  try {
    const { url } = JSON.parse(text.split("\n", 1)[0]);
    if (URLS.includes(url)) return url;
  } catch { /* the server tells which line is wrong */ }
  return URLS[0];
}

function code() {
  return fromCode(["Terminal", "penstock batch run input.jsonl -o out.jsonl\npenstock batch ls"],
    ["Python", `from openai import OpenAI\n\nclient = OpenAI(base_url="${ADDRESS}/v1", api_key=KEY)\nfile = client.files.create(file=open("input.jsonl", "rb"), purpose="batch")\nclient.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")`]);
}
