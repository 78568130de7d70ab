// The server: sends requests with the session's token, and turns refusals into errors with a message. Live views
// read again and again while the page is in front and updates are not paused, and say how fresh they are.

const PAUSED = "penstock-console-paused";

export const updates = {
  get paused() { return localStorage.getItem(PAUSED) === "yes"; },
  set paused(value) {
    localStorage.setItem(PAUSED, value ? "yes" : "no");
    dispatchEvent(new Event("updates"));
  },
};

/** How fresh the page's data is: {state: "loading" | "live" | "stale" | "paused", at}. */
export let fresh = { state: "loading", at: 0 };

export function tellFreshness(state, at = fresh.at) {
  fresh = { state, at };
  dispatchEvent(new Event("freshness"));
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

/** The path below which a proxy serves the API, without a slash at its end; "" for none. */
export const BASE = new URL("../../..", import.meta.url).pathname.replace(/\/$/, "");
/** The address of the API. */
export const ADDRESS = location.origin + BASE;

const TOKEN = "penstock-console-token";

export class Refusal extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export class Unreachable extends Error {}

export const session = {
  get token() { return localStorage.getItem(TOKEN) ?? ""; },
  keep(token) { localStorage.setItem(TOKEN, token); },
  forget() { localStorage.removeItem(TOKEN); },
};

/** Sends one request and returns the Response of a success. Raises Refusal, Unreachable. */
export async function send(method, path, { body, headers = {}, signal } = {}) {
  const json = body !== undefined && !(body instanceof FormData);
  let response;
  try {
    response = await fetch(BASE + path, {
      method, signal, cache: "no-store", credentials: "same-origin",
      headers: { ...(json && { "Content-Type": "application/json" }), "X-Penstock-Console": session.token, ...headers },
      body: json ? JSON.stringify(body) : body,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("The server does not answer.");
  }
  if (response.ok) return response;
  const found = await response.json().catch(() => ({}));
  const { code = "unknown", message = `The server answered ${response.status}.` } = found.error ?? {};
  const refusal = new Refusal(response.status, code, message);
  if (response.status === 401 && path !== "/console/session") dispatchEvent(new CustomEvent("signed-out"));
  throw refusal;
}

export const api = {
  get: async (path, options) => (await send("GET", path, options)).json(),
  post: async (path, body = {}, options) => (await send("POST", path, { ...options, body })).json(),
  delete: async (path, options) => (await send("DELETE", path, options)).json(),
};

/** Opens a session by a link's secret or by a key. Raises Refusal, Unreachable. */
export async function login(proof) {
  const { token } = await api.post("/console/session", proof);
  session.keep(token);
}

export async function logout() {
  await api.delete("/admin/console/session").catch(() => null);
  session.forget();
}

/** Returns the query string of these parameters, without those that are empty. */
export function query(params) {
  const found = new URLSearchParams(Object.entries(params).filter(([, value]) => value));
  return found.size ? `?${found}` : "";
}

/** Saves an answer of the server as a file. */
export async function download(path, name) {
  const response = await send("GET", path);
  save(await response.blob(), name);
}

/** Saves a blob as a file. */
export function save(blob, name) {
  const url = URL.createObjectURL(blob);
  const link = Object.assign(document.createElement("a"), { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
