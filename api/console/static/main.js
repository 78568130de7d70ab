// The console: logs in, shows the page that the address names, and what surrounds every page. Its keyboard: / searches, j
// and k move in a list, Enter opens, ? shows the keys, Esc closes; single keys can be turned off.

import { api, BASE, logout, session, fresh, tellFreshness, updates } from "./api.js";
import { batch, batches } from "./batches.js";
import { chat } from "./chat.js";
import { clock } from "./format.js";
import { job } from "./job.js";
import { jobs } from "./jobs.js";
import { keys } from "./keys.js";
import { letters } from "./letters.js";
import { signIn } from "./login.js";
import { models, overview } from "./overview.js";
import { draw, empty, failed, h, heading, opened } from "./parts.js";
import { usage } from "./usage.js";

const OFF = "penstock-console-keys-off";
const KEYS = [
  ["/", "Search"], ["j  k", "Next, previous row of a list"], ["Enter", "Open the row"],
  ["g then o j d b c m k u", "Go to Overview, Jobs, Dead letters, Batches, Chat, Models, Keys, Usage"], ["p", "Pause or go on with updates"],
  ["?", "Show this"], ["Esc", "Close, or leave a field"],
];
const PLACES = { o: "", j: "/jobs", d: "/dead-letters", b: "/batches", c: "/chat", m: "/models", k: "/keys", u: "/usage" };
let going = -1e9;

export function listenToKeys(go, togglePause) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    const typing = event.target.closest("input, textarea, select, [contenteditable]");
    if (event.key === "Escape" && typing) { typing.blur(); return; }
    if (typing || document.querySelector("dialog[open]") || (localStorage.getItem(OFF) && event.key !== "?")) return;
    if (event.timeStamp - going < 1000 && event.key in PLACES) {
      going = -1e9;
      event.preventDefault();
      go(`/console${PLACES[event.key]}`);
      return;
    }
    const action = { "/": search, j: () => move(1), k: () => move(-1), "?": showKeys, p: togglePause, g: () => { going = event.timeStamp; } }[event.key];
    if (action && action() !== false) event.preventDefault();
  });
}

function search() {
  const field = document.querySelector("input[type=search]");
  if (!field) return false;
  field.focus();
  field.select();
  return true;
}

/** Moves the focus between the rows of the page's list. */
function move(by) {
  const links = [...document.querySelectorAll("[data-row]")];
  if (!links.length) return false;
  const at = links.indexOf(document.activeElement);
  const next = links[Math.min(links.length - 1, Math.max(0, at + by))];
  next.focus();
  next.scrollIntoView({ block: "nearest" });
  return true;
}

export function showKeys() {
  const box = h("input", { type: "checkbox", checked: !localStorage.getItem(OFF) });
  box.onchange = () => (box.checked ? localStorage.removeItem(OFF) : localStorage.setItem(OFF, "yes"));
  const dialog = opened("keys", "Keyboard", {},
    h("dl", { class: "keys" }, KEYS.map(([key, what]) => [h("dt", {}, key.split("  ").map((each) => h("kbd", {}, each))), h("dd", {}, what)])),
    h("label", { class: "check" }, box, "Single keys work"),
    h("div", { class: "actions" }, h("button", { type: "button", onclick: () => dialog.close() }, "Close")));
}

const PAGES = [
  [/^\/console\/?$/, overview], [/^\/console\/jobs\/?$/, jobs], [/^\/console\/jobs\/(?<id>job_[0-9a-f]+)$/, job],
  [/^\/console\/dead-letters\/?$/, letters], [/^\/console\/batches\/?$/, batches], [/^\/console\/batches\/(?<id>batch_[0-9a-f]+)$/, batch],
  [/^\/console\/chat\/?$/, chat], [/^\/console\/models\/?$/, models], [/^\/console\/keys\/?$/, keys],
  [/^\/console\/usage\/?$/, usage],
];
const root = document.getElementById("main"), foot = document.getElementById("foot");
let leaving = new AbortController(), who = null;

/** Opens an address of the console without loading the page anew. */
function go(url) {
  history.pushState(null, "", url.startsWith("/") ? BASE + url : url);
  return show({ focus: true });
}

async function show({ focus = false } = {}) {
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  const route = PAGES.map(([pattern, page]) => [pattern.exec(location.pathname.slice(BASE.length)), page]).find(([match]) => match);
  for (const link of document.querySelectorAll("#nav a")) {
    const here = link.pathname === `${BASE}/console` ? location.pathname.replace(/\/$/, "") === link.pathname : location.pathname.startsWith(link.pathname);
    if (!here) { link.removeAttribute("aria-current"); continue; }
    link.setAttribute("aria-current", "page");
    link.parentElement.scrollLeft = link.offsetLeft - (link.parentElement.clientWidth - link.offsetWidth) / 2; // on a phone, they are a strip
  }
  if (focus) { root.focus({ preventScroll: true }); scrollTo(0, 0); }
  tellFreshness("loading");
  if (!route) {
    title("No such page");
    draw(root, heading("No such page"), empty("Nothing is at this address.", h("a", { href: "/console" }, "Go to the overview")));
    return;
  }
  const [match, page] = route;
  root.replaceChildren();
  page({ root, signal, go, title, who, id: match.groups?.id, params: new URLSearchParams(location.search) });
}

function title(words) {
  document.title = `${words} - Penstock`;
}

function toggleUpdates() {
  updates.paused = !updates.paused;
  drawFoot();
}

function drawFoot() {
  if (!who) { draw(foot); return; }
  const words = { live: "Live", stale: `Not reached.${fresh.at ? ` Data of ${clock(fresh.at)}` : ""}`, paused: `Paused.${fresh.at ? ` Data of ${clock(fresh.at)}` : ""}`, loading: "Loading" }[fresh.state];
  draw(foot,
    h("p", { class: `fresh ${fresh.state}` }, h("span", { class: "dot", "aria-hidden": "true" }), words),
    h("p", { class: "who" }, who.name ?? "admin token", h("span", { class: "dim" }, ` of tenant ${who.tenant}`)),
    h("div", { class: "foot-actions" },
      h("button", { type: "button", class: "small", "aria-pressed": String(updates.paused), onclick: toggleUpdates }, updates.paused ? "Go on" : "Pause updates"),
      h("button", { type: "button", class: "small", onclick: showKeys }, "Keys ?"),
      h("button", { type: "button", class: "small", onclick: leave }, "Log out")));
}

async function leave() {
  await logout();
  location.assign(`${BASE}/console`);
}

async function start(note = "") {
  leaving.abort();
  const linked = location.hash.startsWith("#link=");
  if (linked || !session.token) {
    who = null;
    drawFoot();
    await signIn(root, note);
  }
  try {
    who = await api.get("/admin/console/session");
  } catch (error) {
    if (error.status === 401) return; // signed-out starts anew
    draw(root, heading("Penstock"), failed(error, () => start()));
    setTimeout(start, 3000);
    return;
  }
  drawFoot();
  await show();
}

function followLink(event) {
  const link = event.target.closest("a[href]");
  const plain = event.button === 0 && !event.ctrlKey && !event.metaKey && !event.shiftKey && !event.altKey;
  if (!link || !plain || link.target || link.download || link.origin !== location.origin || !link.pathname.startsWith(`${BASE}/console`)) return;
  if (link.hash && link.pathname === location.pathname) return;
  event.preventDefault();
  go(link.href);
}

for (const link of document.querySelectorAll("header a")) link.href = link.href; // relative ones would follow the address
document.addEventListener("click", followLink);
addEventListener("popstate", () => who && show());
addEventListener("hashchange", () => location.hash.startsWith("#link=") && location.reload()); // a link pasted into an open page
addEventListener("signed-out", () => { session.forget(); start("Your session is over. Log in again."); });
addEventListener("freshness", drawFoot);
listenToKeys(go, toggleUpdates);
start();
