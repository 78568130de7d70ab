// Keyboard: / searches, j and k move in a list, Enter opens, ? shows this, Esc closes. Single keys can be turned off.

import { h } from "./dom.js";

const OFF = "penstock-console-keys-off";
const KEYS = [
  ["/", "Search"], ["j  k", "Next, previous row of a list"], ["Enter", "Open the row"],
  ["g then o j d b c m k", "Go to Overview, Jobs, Dead letters, Batches, Chat, Models, Keys"], ["p", "Pause or go on with updates"],
  ["?", "Show this"], ["Esc", "Close, or leave a field"],
];
const PAGES = { o: "", j: "/jobs", d: "/dead-letters", b: "/batches", c: "/chat", m: "/models", k: "/keys" };
let going = -1e9;

export function listenToKeys(go, togglePause) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    const typing = event.target.closest("input, textarea, select, [contenteditable]");
    if (event.key === "Escape" && typing) { typing.blur(); return; }
    if (typing || document.querySelector("dialog[open]") || (localStorage.getItem(OFF) && event.key !== "?")) return;
    if (event.timeStamp - going < 1000 && event.key in PAGES) {
      going = -1e9;
      event.preventDefault();
      go(`/console${PAGES[event.key]}`);
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
  const dialog = h("dialog", { "aria-labelledby": "keys-title", onclose: () => dialog.remove() },
    h("h2", { id: "keys-title" }, "Keyboard"),
    h("dl", { class: "keys" }, KEYS.map(([key, what]) => [h("dt", {}, key.split("  ").map((each) => h("kbd", {}, each))), h("dd", {}, what)])),
    h("label", { class: "check" }, box, "Single keys work"),
    h("div", { class: "actions" }, h("button", { type: "button", onclick: () => dialog.close() }, "Close")));
  document.body.append(dialog);
  dialog.showModal();
}
