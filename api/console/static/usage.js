// Usage: requests and tokens of the last days (UTC), by model, tenant or key: a bar for each day, and the sums.

import { ADDRESS, api } from "./api.js";
import { count, percent, plural } from "./format.js";
import { empty, fromCode, h, livePage, section, select, table, tile } from "./parts.js";

const DAY_MS = 86_400_000;
const SERIES = 5; // as many have a colour of their own; the others share one
const NAMES = { model: "Model", tenant: "Tenant", key: "Key" };
const AMOUNTS = ["requests", "prompt_tokens", "cached_tokens", "completion_tokens", "total_tokens"];

const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

const isoDay = (ms) => new Date(ms).toISOString().slice(0, 10);
const named = (name) => name || "no key";

export function usage(page) {
  let span = 30, by = "model";
  const read = () => {
    const today = Date.now();
    return api.get(`/admin/usage?by=day,${by}&from=${isoDay(today - (span - 1) * DAY_MS)}&to=${isoDay(today)}`, { signal: page.signal });
  };
  const round = livePage(page, "Usage", 15_000, read, (found) => view(found));

  function choose(change) {
    change();
    round();
  }

  function view({ by: [, split], data, total, from, to }) {
    const groups = [...Map.groupBy(data, (row) => row[split])].map(([name, rows]) => [name, summed(rows)])
      .sort(([, one], [, other]) => other.total_tokens - one.total_tokens || other.requests - one.requests);
    const days = [];
    for (let at = Date.parse(from); at <= Date.parse(to); at += DAY_MS) days.push(isoDay(at));
    return [
      h("div", { class: "filters" },
        select("span", "Days", [["7", "7 days"], ["30", "30 days"], ["90", "90 days"]], String(span), (value) => choose(() => { span = Number(value); })),
        select("by", "By", Object.entries(NAMES), by, (value) => choose(() => { by = value; }))),
      data.length ? [
        h("div", { class: "tiles" },
          tile("Requests", SHORT.format(total.requests), `${count(total.requests)} ended since ${from}, in UTC`),
          tile("Prompt tokens", SHORT.format(total.prompt_tokens), `${count(total.prompt_tokens)}, ${percent(total.cached_tokens / Math.max(1, total.prompt_tokens))} of them cached`),
          tile("Completion tokens", SHORT.format(total.completion_tokens), `${count(total.completion_tokens)} of ${plural(total.total_tokens, "token")} in all`)),
        section("Tokens per day", plot(days, data, groups.map(([name]) => name), split)),
        section(`By ${split}`, sums(`Usage by ${split}`, NAMES[split], groups.map(([name, row]) => [named(name), row]), total)),
        section("By day", sums("Usage by day", "Day", days.map((day) => [day, summed(data.filter((row) => row.day === day))]).filter(([, row]) => row.requests).reverse(), total)),
      ] : empty("Nothing was used in these days.", "A request counts here when it has ended, for the day (UTC) of its end."),
      fromCode(["Terminal", `penstock usage --all --by day,${split}\npenstock usage --all --by tenant,key,model --csv > usage.csv`],
        ["curl", `curl -H "Authorization: Bearer $KEY" '${ADDRESS}/admin/usage?by=day,${split}&format=csv'`]),
    ];
  }
}

function summed(rows) {
  return Object.fromEntries(AMOUNTS.map((name) => [name, rows.reduce((sum, row) => sum + row[name], 0)]));
}

function sums(caption, name, rows, total) {
  return table(caption, [[name, "head"], ["Requests", "num"], ["Prompt", "num"], ["Cached", "num"], ["Completion", "num"], ["Tokens", "num"], ["Share", "num"]],
    rows.map(([label, row]) => [label, label, ...AMOUNTS.map((amount) => count(row[amount])), percent(row.total_tokens / Math.max(1, total.total_tokens))]));
}

/** Stacked bars. Decoration for those who do not see it: the tables below have every number. */
function plot(days, data, names, split) {
  const height = 100, shown = names.slice(0, SERIES), rest = names.length - shown.length;
  const tokens = new Map(days.map((day) => [day, new Array(SERIES + 1).fill(0)]));
  for (const row of data) {
    const at = shown.indexOf(row[split]);
    tokens.get(row.day)[at < 0 ? SERIES : at] += row.total_tokens;
  }
  const sum = (list) => list.reduce((one, other) => one + other, 0);
  const top = Math.max(1, ...[...tokens.values()].map(sum));
  const bars = days.flatMap((day, at) => {
    let below = 0;
    return tokens.get(day).map((value, series) => {
      below += value;
      return value > 0 && h("rect", { class: `s${series}`, x: at + 0.1, width: 0.8, y: (height * (1 - below / top)).toFixed(2), height: ((height * value) / top).toFixed(2) });
    });
  });
  const readout = h("p", { class: "readout dim", "aria-hidden": "true", owned: true });
  const tell = ({ currentTarget, clientX }) => {
    const box = currentTarget.querySelector("svg").getBoundingClientRect();
    const day = days[Math.min(days.length - 1, Math.max(0, Math.floor((days.length * (clientX - box.left)) / Math.max(1, box.width))))];
    const parts = tokens.get(day).map((value, series) => value && `${series < SERIES ? named(shown[series]) : "others"} ${count(value)}`).filter(Boolean);
    currentTarget.querySelector(".readout").textContent = `${day}: ${plural(sum(tokens.get(day)), "token")}${parts.length > 1 ? ` (${parts.join(", ")})` : ""}`;
  };
  const forget = ({ currentTarget }) => { currentTarget.querySelector(".readout").textContent = ""; };
  return h("div", { class: "card chart" },
    h("div", { class: "plot", onpointermove: tell, onpointerleave: forget },
      h("p", { class: "dim note" }, `${count(top)} tokens`),
      h("svg", { class: "stack", viewBox: `0 0 ${days.length} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": `Tokens per day, at most ${count(top)}` }, bars),
      h("p", { class: "dim note ends" }, h("span", {}, days[0]), h("span", {}, days.at(-1))),
      readout),
    h("ul", { class: "legend" }, shown.map((name, series) => h("li", { key: name }, h("span", { class: `swatch s${series}`, "aria-hidden": "true" }), named(name))),
      rest > 0 && h("li", {}, h("span", { class: `swatch s${SERIES}`, "aria-hidden": "true" }), plural(rest, "other"))));
}
