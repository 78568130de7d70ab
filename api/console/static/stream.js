// A job's events: reads them over one connection after another, each after the last event that came.

import { Refusal, Unreachable, send } from "./api.js";
import { milliseconds } from "./format.js";
import { h } from "./dom.js";

const RETRY_MS = [200, 500, 1000, 2000, 4000];
export const ENDED = new Set(["completed", "failed", "cancelled", "expired"]);

/**
 * Follows a job to its end. `on.event(name, data)` gets each event once and in order; `on.lost(error)` is called when the
 * connection breaks, `on.again()` when it stands again. Returns a function that cuts the connection, to see that
 * nothing is lost.
 */
export function follow(jobId, on, signal) {
  let last = "", failures = 0, cut = new AbortController();
  async function read() {
    cut = new AbortController();
    const stop = AbortSignal.any([signal, cut.signal]);
    const headers = { Accept: "text/event-stream", ...(last && { "Last-Event-ID": last }) };
    const response = await send("GET", `/v1/jobs/${jobId}/events`, { headers, signal: stop });
    if (failures) on.again?.();
    failures = 0;
    for await (const { name, id, data } of events(response.body)) {
      if (id) last = id;
      if (name === "ping") continue;
      on.event(name, data);
      if (ENDED.has(name) || name === "error") return true;
    }
    return false;
  }
  async function run() {
    while (!signal.aborted) {
      try {
        if (await read()) return;
        throw new Unreachable("The connection ended.");
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof Refusal && error.status !== 503 && error.status !== 429) { on.event("error", { error: { message: error.message } }); return; }
        failures += 1;
        on.lost?.(error);
        await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(failures, RETRY_MS.length) - 1]));
      }
    }
  }
  run();
  return () => cut.abort();
}

/** Parses server-sent events out of a body. */
async function* events(body) {
  let rest = "";
  for await (const text of body.pipeThrough(new TextDecoderStream())) {
    const blocks = (rest + text).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const event = { name: "message", id: "", data: null };
      for (const line of block.split("\n")) {
        if (line.startsWith("event: ")) event.name = line.slice(7);
        else if (line.startsWith("id: ")) event.id = line.slice(4);
        else if (line.startsWith("data: ")) event.data = JSON.parse(line.slice(6));
      }
      if (event.data !== null) yield event;
    }
  }
}

/** What became of the attempt before this one, as a sentence for the place in the text where it ended. */
export function interruption({ worker, outcome }) {
  return { handed_back: `${worker} was stopped here`, returned: `the server of ${worker} was away here`, preempted: `${worker} made room for a higher lane here` }[outcome] ?? `${worker} was lost here`;
}

/** Shows in the text of a job where an attempt ended and which worker went on; `data` is of its event. */
export function markAttempt(growing, name, data) {
  if (name === "interrupted") growing.mark(interruption(data), { pending: true });
  else if (data.previous) {
    const before = data.previous, same = before.worker === data.worker;
    const again = same && !["returned", "preempted"].includes(before.outcome) ? " and started again" : "";
    growing.mark(`${interruption(before)}${again}; ${data.attempt > 1 ? "continued" : "begun again"}${same ? "" : ` by ${data.worker}`} after ${milliseconds(before.pause_ms)}`);
  }
}

const NEAR_PX = 48;

/**
 * Keeps the end of growing content in view until the reader scrolls up, and again once they are back at the end. `target`
 * scrolls (an element, or the document), `beyond()` is how many pixels of the content are below the fold. Returns a function
 * that shows the end wherever the reader is.
 */
export function keepEndInView(target, content, beyond, signal) {
  const scroller = target === document ? document.scrollingElement : target;
  let following = true, last = scroller.scrollTop;
  const keep = () => { if (following && beyond() > 0) scroller.scrollTop += beyond(); };
  target.addEventListener("scroll", () => {
    if (beyond() < NEAR_PX) following = true;
    else if (scroller.scrollTop < last) following = false;
    last = scroller.scrollTop;
  }, { signal, passive: true });
  const grown = new ResizeObserver(keep);
  for (const each of [content, scroller]) grown.observe(each);
  visualViewport.addEventListener("resize", keep, { signal });
  signal.addEventListener("abort", () => grown.disconnect());
  return () => { following = true; keep(); };
}

/** Text that grows: one text node a part, to which a frame of the screen appends once. */
export class Growing {
  constructor(root) {
    this.root = root;
    this.clear();
  }

  clear() {
    this.root.replaceChildren();
    this.node = this.root.appendChild(document.createTextNode(""));
    this.pending = "";
    this.text = "";
  }

  add(text) {
    this.text += text;
    this.pending += text;
    if (this.frame) return;
    const flush = () => { clearTimeout(this.timer); cancelAnimationFrame(this.frame); this.frame = 0; this.flush(); };
    this.frame = requestAnimationFrame(flush);
    this.timer = setTimeout(flush, 250); // a page in the background gets no frames
  }

  flush() {
    if (this.pending) this.node.appendData(this.pending);
    this.pending = "";
  }

  /** Puts a mark at the text's present end; it takes the place of a pending one. */
  mark(words, { pending = false } = {}) {
    this.flush();
    this.pendingMark?.remove();
    const mark = this.root.appendChild(h("span", { class: "joint", role: "note" }, words));
    this.pendingMark = pending ? mark : null;
    this.node = this.root.appendChild(document.createTextNode(""));
  }
}
