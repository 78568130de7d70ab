// The server: sends requests with the session's token, and turns refusals into errors with a message.

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
