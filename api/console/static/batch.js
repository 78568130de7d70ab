// One batch: how far it is, which lines were refused and why, and what can be done with it.

import { ADDRESS, api } from "./api.js";
import { actionsOf, ENDED, progressOf, stateOf } from "./batches.js";
import { count, plural, rate } from "./format.js";
import { watch } from "./live.js";
import { badge, copyButton, draw, empty, failed, fromCode, h, heading, loading, modelLink, section, table, when } from "./parts.js";

export function batch({ root, signal, id, title }) {
  title("Batch");
  draw(root, heading("Batch"), loading());
  const round = watch({
    signal, everyMs: 2000,
    read: () => api.get(`/v1/batches/${id}`, { signal }),
    show: (found, error) => {
      if (!found) { draw(root, heading("Batch"), error.status === 404 ? empty("This batch is not here.", error.message, " ", h("a", { href: "/console/batches" }, "Show all batches")) : failed(error, round)); return; }
      title(`${stateOf(found)} - Batch`);
      draw(root, heading("Batch", badge(stateOf(found)), h("code", { class: "id long" }, found.id), copyButton(found.id, "Copy id")),
        error && failed(error, round),
        h("div", { class: "actions" }, actionsOf(found, round)),
        h("section", { class: "card" }, progressOf(found)),
        facts(found), faults(found), code(id));
    },
  });
}

function facts(found) {
  const { failed: bad } = found.request_counts, ended = found.completed_at ?? found.failed_at ?? found.expired_at ?? found.cancelled_at;
  const rows = [["Model", found.model && modelLink(found.model)], ["Endpoint", found.endpoint], ["Lane", found.lane && `${found.lane}${found.lane_reason ? ` (${found.lane_reason})` : ""}`], ["Window", found.completion_window],
    ["Lines that failed", bad ? h("span", { class: "warn-text" }, count(bad)) : null],
    ["Pace", ENDED.has(found.status) ? null : `${rate(found.lines_per_second)}/s`],
    ["In the queue", ENDED.has(found.status) ? null : plural(found.lines_in_queue, "line")],
    ["Tokens", `${count(found.usage.input_tokens)} in, ${count(found.usage.output_tokens)} out`],
    ["Created", when(found.created_at)], ["Began", found.in_progress_at && when(found.in_progress_at)], ["Ended", ended && when(ended)],
    ["Window ends", !ended && found.expires_at ? h("time", { datetime: new Date(found.expires_at * 1000).toISOString() }, new Date(found.expires_at * 1000).toLocaleString("en-GB")) : null],
    ...Object.entries(found.metadata ?? {})];
  return h("dl", { class: "facts" }, rows.filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

/** Why the file was refused, by line. */
function faults({ errors }) {
  if (!errors?.data.length) return null;
  return section("Why it was refused", table("Refused lines", [["Line", "num"], ["Field"], ["Code"], ["Message"]], errors.data.map((one, number) => h("tr", { key: number },
    h("td", { class: "num" }, one.line ?? "–"), h("td", {}, one.param ?? "–"), h("td", {}, one.code), h("td", {}, one.message)))));
}

function code(id) {
  return fromCode(["Terminal", `penstock batch show ${id}\npenstock batch output ${id} > answers.jsonl\npenstock batch errors ${id}`],
    ["curl", `curl -H "Authorization: Bearer $KEY" ${ADDRESS}/v1/batches/${id}`]);
}
