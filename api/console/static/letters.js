// Dead letters: jobs that were given up, by reason; replay or drop one, or all of a reason.

import { ADDRESS, api } from "./api.js";
import { plural } from "./format.js";
import { act, confirmed, empty, fromCode, h, jobLink, livePage, modelLink, section, table, when } from "./parts.js";

const MOST = 100;
const WHY = {
  poison: "Each worker that ran the job died, the last one while it ran nothing else.",
  attempts_exhausted: "Every worker that took the job was lost.",
  malformed: "What the store holds of it cannot be read.",
};

export function letters(page) {
  const round = livePage(page, "Dead letters", 4000, () => api.get(`/admin/dlq?limit=${MOST}`, { signal: page.signal }), ({ data }) => {
    page.title(data.length ? `${data.length} - Dead letters` : "Dead letters");
    return view(data);
  });

  async function replay(some) {
    if (some.length > 1 && !(await confirmed(`Replay ${plural(some.length, "dead letter")}?`, "Each becomes a new job, and its letter is removed.", `Replay ${some.length}`))) return;
    await each(some, (letter) => api.post(`/admin/dlq/${letter.id}/replay`), "replayed");
  }

  async function drop(some) {
    if (!(await confirmed(`Drop ${plural(some.length, "dead letter")}?`, "They cannot be replayed any more.", `Drop ${some.length}`))) return;
    await each(some, (letter) => api.delete(`/admin/dlq/${letter.id}`), "dropped");
  }

  async function each(some, work, done) {
    await act(async () => { for (const letter of some) await work(letter); }, `${plural(some.length, "dead letter")} ${done}.`);
    round();
  }

  function view(all) {
    if (!all.length) return empty("No dead letters.", "Penstock puts a job here when it gives it up, for instance because every worker that ran it died.");
    const groups = Map.groupBy(all, ({ reason }) => reason);
    return [
      all.length === MOST && h("p", { class: "dim" }, `The newest ${MOST} are shown.`),
      [...groups].map(([reason, some]) => group(reason, some)),
      fromCode(["Terminal", "penstock dlq ls\npenstock dlq replay ID"], ["curl", `curl -X POST -H "Authorization: Bearer $KEY" ${ADDRESS}/admin/dlq/ID/replay`]),
    ];
  }

  function group(reason, some) {
    const jobs = some.filter((letter) => letter.job_id);
    const times = some.map(({ at }) => at);
    const part = section(`${reason.replaceAll("_", " ")}: ${plural(some.length, "letter")}`,
      h("p", { class: "dim" }, WHY[reason] ?? "", " First ", when(Math.min(...times)), ", last ", when(Math.max(...times)), "."),
      h("div", { class: "actions" },
        jobs.length > 0 && h("button", { type: "button", onclick: () => replay(jobs) }, `Replay all ${jobs.length}`),
        h("button", { type: "button", class: "danger", onclick: () => drop(some) }, `Drop all ${some.length}`)),
      table(`Dead letters: ${reason}`, [["When"], ["Job"], ["Model", null, "name"], ["Lane"], ["Actions"]], some.map((letter) => [letter, ...laneOf(letter.lane)]).map(([letter, model, lane]) => [letter.id,
        when(letter.at), letter.job_id ? jobLink(letter.job_id) : letter.entry, model ? modelLink(model) : "–", lane ?? "–",
        h("div", { class: "actions tight" },
          letter.job_id && h("button", { type: "button", class: "small", onclick: () => replay([letter]), "aria-label": `Replay ${letter.job_id}` }, "Replay"),
          h("button", { type: "button", class: "small danger", onclick: () => drop([letter]), "aria-label": `Drop ${letter.job_id ?? letter.id}` }, "Drop"))])));
    part.key = reason;
    return part;
  }
}

/** The model and the lane that "model:lane" names; a model's name may have colons. */
function laneOf(name) {
  const at = name?.lastIndexOf(":") ?? -1;
  return at < 0 ? [null, name] : [name.slice(0, at), name.slice(at + 1)];
}
