// Live views: reads again and again while the page is in front and updates are not paused, and says how fresh it is.

import { Refusal } from "./api.js";

const PAUSED = "penstock-console-paused";

export const updates = {
  get paused() { return localStorage.getItem(PAUSED) === "yes"; },
  set paused(value) {
    localStorage.setItem(PAUSED, value ? "yes" : "no");
    dispatchEvent(new Event("updates"));
  },
};

/** How fresh the page's data is: {state: "loading" | "live" | "stale" | "paused", at}. */
export const freshness = new EventTarget();
let freshNow = { state: "loading", at: 0 };

export function tellFreshness(state, at = freshNow.at) {
  freshNow = { state, at };
  freshness.dispatchEvent(new CustomEvent("change", { detail: freshNow }));
}

/**
 * Reads with `read` every `everyMs` until the signal aborts, and shows each answer with `show(data, error)`. After a
 * failure `data` is the last one that was read (null: none), and `error` says why it is old. Returns a function that reads at
 * once.
 */
export function watch({ read, show, everyMs, signal }) {
  let timer = 0, data = null, running = false, again = false;
  async function round() {
    clearTimeout(timer);
    if (signal.aborted) return;
    if (running) { again = true; return; }
    running = true;
    try {
      data = await read();
      if (signal.aborted) return;
      show(data, null);
      tellFreshness(updates.paused ? "paused" : "live", Date.now() / 1000);
    } catch (error) {
      if (signal.aborted || error.name === "AbortError") return;
      if (error instanceof Refusal && error.status === 401) return;
      show(data, error);
      const gone = error instanceof Refusal && [404, 410].includes(error.status); // that is an answer, too
      tellFreshness(gone ? "live" : "stale", gone ? Date.now() / 1000 : undefined);
    } finally {
      running = false;
    }
    if (again) { again = false; round(); } else schedule();
  }
  function schedule() {
    clearTimeout(timer);
    const quiet = document.hidden || updates.paused || !everyMs;
    if (!signal.aborted && !quiet) timer = setTimeout(round, everyMs);
  }
  const resume = () => (document.hidden || updates.paused ? (clearTimeout(timer), updates.paused && tellFreshness("paused")) : round());
  document.addEventListener("visibilitychange", resume, { signal });
  addEventListener("updates", resume, { signal });
  signal.addEventListener("abort", () => clearTimeout(timer));
  round();
  return round;
}
