// Parts that several pages share: badges, times, tables, empty and failed states, charts, dialogs, code to copy.

import { Refusal, watch } from "./api.js";
import { draw, h } from "./dom.js";
import { age, clock, shortId, utc } from "./format.js";

export const LANES = ["interactive", "standard", "batch"];
const STATES = {
  queued: ["wait", "◷"], in_progress: ["run", "▶"], completed: ["good", "✓"], failed: ["bad", "✕"],
  cancelled: ["dim", "⊘"], expired: ["warn", "⧖"], "server away": ["bad", "✕"],
  ready: ["good", "✓"], starting: ["wait", "◷"], draining: ["warn", "↧"], drained: ["dim", "⊘"],
  validating: ["wait", "◷"], finalizing: ["run", "▶"], cancelling: ["warn", "⊘"], paused: ["warn", "‖"],
  lost: ["bad", "✕"], handed_back: ["warn", "↩"], preempted: ["warn", "⇅"],
  valid: ["good", "✓"], revoked: ["dim", "⊘"],
};

/** A state as word, shape and colour. */
export function badge(state) {
  const [tone, sign] = STATES[state] ?? ["dim", "•"];
  return h("span", { class: `badge ${tone}` }, h("span", { "aria-hidden": "true" }, sign), state.replace("_", " "));
}

export function when(at, { relative = true } = {}) {
  if (!at) return "–";
  return h("time", { datetime: new Date(at * 1000).toISOString(), title: utc(at) }, relative ? age(at) : clock(at));
}

/** A job in a row of a list. */
export function jobLink(id) {
  return h("a", { href: `/console/jobs/${id}`, class: "id", title: id, "data-row": true }, shortId(id));
}

/** A model, or a worker where it runs now; one that is gone leads to the list of those that are there. */
export function modelLink(name) {
  return h("a", { href: `/console/models#${encodeURIComponent(name)}` }, name);
}

export function tenantLink(tenant) {
  return h("a", { href: `/console/jobs?tenant=${encodeURIComponent(tenant)}` }, tenant);
}

export function heading(title, ...beside) {
  return h("div", { class: "heading" }, h("h1", {}, title), h("div", { class: "beside" }, ...beside));
}

export function section(title, ...content) {
  return h("section", {}, h("h2", {}, title), ...content);
}

export function tile(name, value, note, plot = null) {
  return h("div", { class: "card tile" }, h("h2", { class: "label" }, name), h("p", { class: "big" }, value), h("p", { class: "dim note" }, note), plot);
}

/** A table in its own scrolling region. `columns`: [title, class, class of its cells if that differs]; the cells of class
 *  "head" are the heads of their rows. `rows`: [key, ...cells]; a cell that is an element of a table stays as it is. */
export function table(caption, columns, rows) {
  const cell = (value, [, kind, own = kind]) => value instanceof HTMLTableCellElement ? value : own === "head" ? h("th", { scope: "row" }, value) : h("td", { class: own }, value);
  return h("div", { class: "scroll", role: "region", "aria-label": caption, tabindex: 0 },
    h("table", {}, h("caption", {}, caption),
      h("thead", {}, h("tr", {}, columns.map(([title, kind]) => h("th", { scope: "col", class: kind === "head" ? null : kind }, title)))),
      h("tbody", {}, rows.map(([key, ...cells]) => h("tr", { key }, cells.map((value, at) => cell(value, columns[at])))))));
}

export function empty(title, ...words) {
  return h("div", { class: "empty" }, h("p", { class: "strong" }, title), h("p", {}, ...words));
}

export function loading() {
  return h("div", { class: "empty" }, h("p", {}, "Loading…"));
}

/** What a page shows above old data, or instead of data, after a failed read. */
export function failed(error, retry) {
  const refused = error instanceof Refusal;
  return h("div", { class: "notice bad" },
    h("p", { class: "strong" }, refused ? "The server refused this" : "The server does not answer"),
    h("p", {}, refused ? error.message : "What you see may be old. The page tries again by itself."),
    retry && h("button", { type: "button", onclick: retry }, "Try now"));
}

/** Shows a page that is read again and again: `view(found, failure, error)`; all but what was found last is null after a
 *  read that succeeded. Returns a function that reads at once. */
export function live({ root, signal, title }, name, everyMs, read, view) {
  title(name);
  draw(root, heading(name), loading());
  const round = watch({ signal, everyMs, read, show: (found, error) => draw(root, view(found, error && failed(error, round), error)) });
  return round;
}

/** A live page: its heading, a failure of the last read, and `view(found)`. */
export function livePage(page, name, everyMs, read, view) {
  return live(page, name, everyMs, read, (found, failure) => [heading(name), failure, found && view(found)]);
}

/** A live page of one thing, `name`: `view(found, failure)`, or that it is not here (any more), with a link to the list of all. */
export function liveThing(page, name, everyMs, read, view, list, all) {
  const gone = (error) => empty(`This ${name.toLowerCase()} is not here.`, error.message, " ", h("a", { href: list }, all));
  return live(page, name, everyMs, read, (found, failure, error) => found ? view(found, failure) : [heading(name), [404, 410].includes(error.status) ? gone(error) : failure]);
}

/** Names and values; those without a value are left out. */
export function facts(rows, long = []) {
  const known = rows.filter(([, value]) => value !== null && value !== undefined);
  return h("dl", { class: "facts" }, known.map(([name, value]) => h("div", { class: long.includes(name) ? "long" : null }, h("dt", {}, name), h("dd", {}, value))));
}

/** A sentence that a screen reader speaks: the outcome of an action, or its failure. */
export function say(text, bad = false) {
  const box = document.getElementById(bad ? "alert" : "status");
  box.textContent = text;
  clearTimeout(box.timer);
  box.timer = setTimeout(() => { box.textContent = ""; }, bad ? 12000 : 6000);
}

/** Runs an action of a button and tells its outcome. */
export async function act(work, done) {
  try {
    const result = await work();
    if (done) say(typeof done === "function" ? done(result) : done);
    return result;
  } catch (error) {
    say(error.message, true);
    return null;
  }
}

/** Opens a dialog with this content below its title; a closed one is gone. `name` begins its ids. */
export function opened(name, title, props, ...content) {
  const dialog = h("dialog", { "aria-labelledby": `${name}-title`, onclose: () => dialog.remove(), ...props }, h("h2", { id: `${name}-title` }, title), ...content);
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

/** Asks before a change that cannot be undone; resolves to whether to go on. */
export function confirmed(title, words, yes) {
  const dialog = opened("confirm", title, {}, h("p", {}, words),
    h("div", { class: "actions" },
      h("button", { type: "button", onclick: () => dialog.close("no") }, "Keep"),
      h("button", { type: "button", class: "danger", onclick: () => dialog.close("yes") }, yes)));
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes")));
}

/**
 * A line chart of points [time, value]; `sentence` is what it says, for those who do not see it. `text` shows a value, and
 * `marks`, [time, words], are events that the chart shows as lines. Below the pointer stands what the chart has there.
 */
export function chart(points, sentence, { text = String, marks = [] } = {}) {
  const known = points.filter(([, value]) => value !== null && value !== undefined);
  const width = 240, height = 40;
  const svg = h("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": sentence });
  const readout = h("p", { class: "readout dim", "aria-hidden": "true", owned: true });
  if (known.length < 2) {
    svg.append(h("line", { x1: 0, y1: height - 1, x2: width, y2: height - 1, class: "base" }));
    return h("div", { class: "chart" }, svg, readout);
  }
  const times = known.map(([time]) => time), top = Math.max(...known.map(([, value]) => value), 1e-9);
  const [first, span] = [times[0], Math.max(1, times.at(-1) - times[0])];
  const across = (time) => (((time - first) / span) * width).toFixed(1);
  const line = known.map(([time, value]) => `${across(time)} ${(height - 2 - (value / top) * (height - 6)).toFixed(1)}`).join(" L");
  const events = marks.filter(([time]) => time >= first && time <= times.at(-1));
  svg.append(h("path", { class: "area", d: `M0 ${height} L${line} L${width} ${height} Z` }), h("path", { class: "line", d: `M${line}` }),
    ...events.map(([time]) => h("line", { class: "event", x1: across(time), y1: 0, x2: across(time), y2: height })));

  function tell({ currentTarget, clientX }) {
    const box = currentTarget.getBoundingClientRect();
    const at = first + (span * (clientX - box.left)) / Math.max(1, box.width);
    const nearest = (list) => list.reduce((best, one) => (Math.abs(one[0] - at) < Math.abs(best[0] - at) ? one : best));
    const [time, value] = nearest(known), event = events.length ? nearest(events) : null;
    const words = event && Math.abs(event[0] - at) < span / 40 ? `, ${event[1]}` : "";
    currentTarget.querySelector(".readout").textContent = `${clock(time)}: ${text(value)}${words}`;
  }
  const forget = ({ currentTarget }) => { currentTarget.querySelector(".readout").textContent = ""; };
  return h("div", { class: "chart", onpointermove: tell, onpointerleave: forget }, svg, readout);
}

/** A bar on a line of time; both numbers are shares of the line. Decoration: the table has the numbers. */
export function bar(begins, length, kind) {
  const svg = h("svg", { class: `bar ${kind}`, viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" });
  const width = Math.min(100, Math.max(0.6, 100 * length));
  svg.append(h("rect", { class: "rail", x: 0, y: 3, width: 100, height: 2 }), h("rect", { x: Math.min(100 - width, 100 * begins).toFixed(2), y: 0, width: width.toFixed(2), height: 8 }));
  return svg;
}

export function copyButton(text, label = "Copy") {
  return h("button", {
    type: "button", class: "small", onclick: () => act(() => navigator.clipboard.writeText(text), "Copied."),
  }, label);
}

/** Closed box "Do this from code": snippets of [name, text], each with a button to copy it. */
export function fromCode(...snippets) {
  return h("details", { class: "code" }, h("summary", {}, "Do this from code"),
    snippets.map(([name, text]) => h("div", { class: "snippet" },
      h("div", { class: "snippet-head" }, h("span", {}, name), copyButton(text)),
      h("pre", { tabindex: 0, role: "region", "aria-label": name }, text))));
}

/** The options of a select; `chosen` is one of their values. */
export function select(name, label, options, chosen, onchange) {
  return h("label", { class: "field" }, h("span", {}, label),
    h("select", { name, onchange: (event) => onchange?.(event.target.value) },
      options.map(([value, text]) => h("option", { value, selected: value === chosen }, text))));
}

export { draw, h };
