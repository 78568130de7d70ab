// Models: what each can do, its engine, and the workers that serve it.

import { api } from "./api.js";
import { count, milliseconds, seconds } from "./format.js";
import { watch } from "./live.js";
import { badge, draw, failed, fromCode, h, heading, loading, section, table, when } from "./parts.js";

export function models({ root, signal, title }) {
  title("Models");
  let shown = false; // the address may name a model or a worker: it is scrolled to once
  draw(root, heading("Models"), loading());
  const round = watch({
    signal, everyMs: 3000,
    read: async () => {
      const [pools, cards] = await Promise.all([api.get("/admin/pools", { signal }), api.get("/v1/models", { signal })]);
      return pools.data.map((pool) => ({ ...pool, card: cards.data.find(({ id }) => id === pool.model) ?? {} }));
    },
    show: (found, error) => {
      draw(root, heading("Models"), error && failed(error, round), found?.map(model));
      if (found && !shown) document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView({ block: "center" });
      shown ||= Boolean(found);
    },
  });
}

function model(pool) {
  const { card } = pool;
  const can = Object.entries(card.capabilities ?? {}).filter(([, value]) => value === true).map(([name]) => name.replaceAll("_", " "));
  const rows = [["Engine", pool.engine], ["Context", card.context_length ? `${count(card.context_length)} tokens` : "unknown until a worker has loaded it"],
    ["Workers", `${pool.ready} ready, ${pool.starting} starting; ${pool.want ?? "–"} wanted, ${pool.min} to ${pool.max}`],
    ["Why", pool.reason ?? "no scheduler has decided yet"],
    ["Cold start", pool.cold_start_s === null ? "–" : seconds(pool.cold_start_s)], ["Can", can.join(", ") || "–"],
    ["Set by hand", pool.override ? `${pool.override.paused ? "scaling is paused" : `${pool.override.want} workers`}, by ${pool.override.by || "an operator"}` : "no"]];
  const part = section(pool.model,
    h("dl", { class: "facts" }, rows.map(([name, value]) => h("div", { class: ["Why", "Can"].includes(name) ? "long" : null }, h("dt", {}, name), h("dd", {}, value)))),
    pool.workers.length ? table(`Workers of ${pool.model}`, [["Worker"], ["State"], ["Slots", "num"], ["Engine step", "num"], ["Started"], ["Host"], ["Note"]], pool.workers.map((worker) => h("tr", { key: `${worker.id} ${worker.host} ${worker.since}` },
      h("th", { scope: "row", id: worker.id }, worker.id), h("td", {}, badge(worker.away?.length ? "server away" : worker.state)), h("td", { class: "num" }, `${worker.running} of ${worker.slots}`),
      h("td", { class: "num" }, milliseconds(worker.step_ms)), h("td", {}, when(worker.since)), h("td", { class: "dim" }, worker.host), h("td", {}, worker.cordon ?? ""))))
      : h("p", { class: "dim" }, "No worker runs now."),
    fromCode(["Terminal", `penstock scale set ${pool.model} 2 --for 1h\npenstock scale resume ${pool.model}`]));
  part.key = pool.model;
  part.id = pool.model;
  return part;
}
