// Elements: builds them, and changes the page to what a view asks for while it keeps focus, selection and open details.

import { BASE } from "./api.js";

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "path", "line", "rect", "circle", "g", "polyline"]);

/** Builds an element. `props`: attributes; on…: listeners; style: an object; key: its identity among its siblings. */
export function h(tag, props, ...children) {
  const node = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "key") node.key = value;
    else if (name === "owned") node.owned = true; // its children are changed by its view alone
    else if (name === "style") for (const [rule, to] of Object.entries(value)) node.style.setProperty(rule, to);
    else if (name.startsWith("on")) listen(node, name, value);
    else if (name === "href" && value.startsWith("/")) node.setAttribute(name, BASE + value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...flat(children));
  if (tag === "select") node.value = node.querySelector("option[selected]")?.value ?? node.value;
  return node;
}

/** Shows these nodes as the children of `root`, and reuses the elements that are there. */
export function draw(root, ...nodes) {
  reconcile(root, flat(nodes));
}

function flat(nodes) {
  return nodes.flat(Infinity).filter((node) => node !== null && node !== undefined && node !== false && node !== "")
    .map((node) => (node instanceof Node ? node : document.createTextNode(String(node))));
}

function listen(node, name, listener) {
  node.listeners ??= {};
  node.listeners[name] = listener;
  node[name] = listener;
}

function reconcile(parent, wanted) {
  const keyed = new Map();
  for (const child of parent.childNodes) if (child.key !== undefined) keyed.set(child.key, child);
  let at = parent.firstChild;
  for (const node of wanted) {
    const found = node.key === undefined ? at : keyed.get(node.key);
    if (found && alike(found, node)) {
      if (found === at) at = at.nextSibling;
      else parent.insertBefore(found, at);
      change(found, node);
    } else {
      parent.insertBefore(node, at);
    }
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function alike(one, other) {
  return one.nodeType === other.nodeType && one.nodeName === other.nodeName && one.key === other.key;
}

function change(now, to) {
  if (now.nodeType === Node.TEXT_NODE) {
    if (now.data !== to.data) now.data = to.data;
    return;
  }
  for (const { name } of [...now.attributes]) {
    if (!to.hasAttribute(name) && name !== "style" && !(name === "open" && now.nodeName === "DETAILS")) now.removeAttribute(name);
  }
  for (const { name, value } of to.attributes) {
    if (name === "style" || now.getAttribute(name) === value) continue;
    now.setAttribute(name, value);
    if (name === "value" && now.nodeName === "PROGRESS") now.value = Number(value);
  }
  if (now.style.cssText !== to.style.cssText) now.style.cssText = to.style.cssText;
  for (const name of Object.keys(now.listeners ?? {})) if (!to.listeners?.[name]) now[name] = null;
  for (const [name, listener] of Object.entries(to.listeners ?? {})) listen(now, name, listener);
  if (now.owned) return;
  const chosen = to.value; // before its options move
  reconcile(now, [...to.childNodes]);
  if (now.nodeName === "SELECT" && now !== document.activeElement) now.value = chosen;
}
