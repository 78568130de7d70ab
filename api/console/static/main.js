// The console: logs in, shows the page that the address names, and what surrounds every page.

import { api, BASE, logout, session } from "./api.js";
import { batch } from "./batch.js";
import { batches } from "./batches.js";
import { chat } from "./chat.js";
import { clock } from "./format.js";
import { job } from "./job.js";
import { jobs } from "./jobs.js";
import { listenToKeys, showKeys } from "./keyboard.js";
import { keys } from "./keys.js";
import { letters } from "./letters.js";
import { freshness, tellFreshness, updates } from "./live.js";
import { signIn } from "./login.js";
import { models } from "./models.js";
import { overview } from "./overview.js";
import { draw, empty, failed, h, heading } from "./parts.js";

const PAGES = [
  [/^\/console\/?$/, overview], [/^\/console\/jobs\/?$/, jobs], [/^\/console\/jobs\/(?<id>job_[0-9a-f]+)$/, job],
  [/^\/console\/dead-letters\/?$/, letters], [/^\/console\/batches\/?$/, batches], [/^\/console\/batches\/(?<id>batch_[0-9a-f]+)$/, batch],
  [/^\/console\/chat\/?$/, chat], [/^\/console\/models\/?$/, models], [/^\/console\/keys\/?$/, keys],
];
const THEME = "penstock-console-theme";
const root = document.getElementById("main"), foot = document.getElementById("foot");
let leaving = new AbortController(), who = null, fresh = { state: "loading", at: 0 };

/** Opens an address of the console without loading the page anew. */
function go(url, { replace = false } = {}) {
  history[replace ? "replaceState" : "pushState"](null, "", url.startsWith("/") ? BASE + url : url);
  return show({ focus: !replace });
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

function setTheme(theme) {
  if (theme) localStorage.setItem(THEME, theme); else localStorage.removeItem(THEME);
  applyTheme();
  drawFoot();
}

function applyTheme() {
  const theme = localStorage.getItem(THEME);
  if (theme) document.documentElement.dataset.theme = theme; else delete document.documentElement.dataset.theme;
}

function drawFoot() {
  if (!who) { draw(foot); return; }
  const words = { live: "Live", stale: `Not reached.${fresh.at ? ` Data of ${clock(fresh.at)}` : ""}`, paused: `Paused.${fresh.at ? ` Data of ${clock(fresh.at)}` : ""}`, loading: "Loading" }[fresh.state];
  const theme = localStorage.getItem(THEME) ?? "";
  const next = { "": "dark", dark: "light", light: "" }[theme];
  draw(foot,
    h("p", { class: `fresh ${fresh.state}` }, h("span", { class: "dot", "aria-hidden": "true" }), words),
    h("p", { class: "who" }, who.name ?? "admin token", h("span", { class: "dim" }, ` of tenant ${who.tenant}`)),
    h("div", { class: "foot-actions" },
      h("button", { type: "button", class: "small", "aria-pressed": String(updates.paused), onclick: toggleUpdates }, updates.paused ? "Go on" : "Pause updates"),
      h("button", { type: "button", class: "small", onclick: showKeys }, "Keys ?"),
      h("button", { type: "button", class: "small", onclick: () => setTheme(next) }, `Theme: ${theme || "system"}`),
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
applyTheme();
document.addEventListener("click", followLink);
addEventListener("popstate", () => who && show());
addEventListener("hashchange", () => location.hash.startsWith("#link=") && location.reload()); // a link pasted into an open page
addEventListener("signed-out", () => { session.forget(); start("Your session is over. Log in again."); });
freshness.addEventListener("change", ({ detail }) => { fresh = detail; drawFoot(); });
listenToKeys(go, toggleUpdates);
start();
