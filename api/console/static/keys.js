// Keys: who may use the server and for what; creates, rotates and revokes those that are kept in the store. A key is shown
// once, in the answer that makes it. Below them: what tenants store.

import { ADDRESS, api } from "./api.js";
import { bytes, count, plural } from "./format.js";
import { LANES, act, badge, confirmed, empty, fromCode, h, livePage, opened, section, select, table, tenantLink, when } from "./parts.js";

const MOST = 100;
const DAY_S = 86400;

export function keys(page) {
  const read = () => Promise.all(["/admin/keys", "/admin/tenants"].map((path) => api.get(path, { signal: page.signal })));
  const round = livePage(page, "Keys and storage", 5000, read, ([{ data }, tenants]) => {
    const valid = data.filter(({ state = "valid" }) => state === "valid"), over = data.filter((key) => !valid.includes(key)).reverse();
    return [
      section("Keys",
        h("div", { class: "actions" }, h("button", { type: "button", class: "primary", onclick: () => create(data) }, "Create a key")),
        valid.length ? list("Keys, by age", valid) : empty(data.length ? "No key is valid." : "There are no keys.",
          data.length ? "Nobody but the holder of the admin token is served." : "The server answers to everybody on this machine, and to nobody else. The first key closes it to requests without one.")),
      over.length > 0 && h("details", { class: "code" }, h("summary", {}, plural(over.length, "revoked or expired key")), list("Revoked and expired keys, newest first", over.slice(0, MOST))),
      storage(tenants.data),
      fromCode(["Terminal", "penstock keys create team-a --label \"nightly runs\" --lane batch --expires 90d\npenstock keys ls\npenstock keys rotate ID\npenstock keys revoke ID\npenstock tenants"],
        ["curl", `curl ${ADDRESS}/admin/keys -H "Authorization: Bearer $KEY" -H "Content-Type: application/json" -d '{"tenant": "team-a"}'`],
        ["penstock.toml", "[keys.team-a]\nsha256 = \"...\"        # printf %s KEY | sha256sum\ntenant = \"team-a\"\npriority = \"standard\"   # the highest lane"])];
  });

  function list(caption, all) {
    return table(caption, [["State"], ["Key", "head"], ["Tenant"], ["Highest lane"], ["May use", "name"], ["Limits"], ["Last use"], ["Expires"], ["Actions"]], all.map((key) => [key.name,
      badge(key.state ?? "valid"), named(key), tenantLink(key.tenant), key.highest_lane, scope(key), limits(key),
      key.id ? when(key.last_used_at) : h("span", { class: "dim" }, "not kept"), until(key), key.state === "valid" && actions(key)]));
  }

  function actions(key) {
    const name = key.label || key.id, own = key.name === page.who.name ? " You are logged in with it, and will be logged out." : "";
    const rotate = async () => {
      if (!(await confirmed(`Rotate ${name}?`, `It gets a new secret. The old one is void at once, and answers to it end.${own}`, "Rotate"))) return;
      const made = await act(() => api.post(`/admin/keys/${key.id}/rotate`));
      if (made) reveal(made);
      round();
    };
    const revoke = async () => {
      if (!(await confirmed(`Revoke ${name}?`, `For good: nobody can use it again, and its open answers end. Jobs and batches that nobody waits for go on.${own}`, "Revoke"))) return;
      await act(() => api.delete(`/admin/keys/${key.id}`), `${name} is revoked.`);
      round();
    };
    return h("div", { class: "actions tight" },
      h("button", { type: "button", class: "small", onclick: rotate, "aria-label": `Rotate ${name}` }, "Rotate"),
      h("button", { type: "button", class: "small danger", onclick: revoke, "aria-label": `Revoke ${name}` }, "Revoke"));
  }

  /** Asks what the new key is for, in a dialog that no reading of the page changes. */
  function create(all) {
    const problem = h("p", { id: "key-error", class: "bad-text", role: "alert" });
    const text = (name, label, props = {}) => h("label", { class: "field" }, h("span", {}, label), h("input", { name, type: "text", autocomplete: "off", spellcheck: "false", ...props }));
    const words = (value) => value.split(/[\s,]+/).filter(Boolean);
    async function send(event) {
      event.preventDefault();
      const { tenant, label, lane, expiry, models, endpoints, limited, admin } = event.target.elements;
      if (!tenant.value.trim()) { problem.textContent = "Enter a tenant."; tenant.focus(); return; }
      const body = {
        tenant: tenant.value.trim(), label: label.value.trim(), highest_lane: lane.value, admin: admin.checked, models: words(models.value), endpoints: words(endpoints.value),
        ...(expiry.value && { expires_in_s: Number(expiry.value) * DAY_S }),
        ...(limited.value.trim() && { limits: Object.fromEntries(words(limited.value).map((each) => [each.split("=")[0], Number(each.split("=")[1])])) }),
      };
      try {
        const made = await api.post("/admin/keys", body);
        dialog.close();
        reveal(made);
      } catch (error) {
        problem.textContent = error.message;
      }
      round();
    }
    const dialog = opened("create", "Create a key", {},
      !all.length && h("p", { class: "warn-text" }, "It is the first one: from then on, every request needs a key. The console stays open to the admin token."),
      h("form", { class: "form", onsubmit: send, novalidate: true },
        text("tenant", "Tenant: whose jobs, files and limits it uses", { list: "key-tenants", maxlength: 128, required: true, "aria-describedby": "key-error" }),
        h("datalist", { id: "key-tenants" }, [...new Set(all.map(({ tenant }) => tenant))].sort().map((value) => h("option", { value }))),
        text("label", "Label: what it is for", { maxlength: 200 }),
        select("lane", "Highest lane", LANES.map((lane) => [lane, lane]), "interactive"),
        select("expiry", "Expires", [["", "never"], ["7", "in 7 days"], ["30", "in 30 days"], ["90", "in 90 days"], ["365", "in a year"]], ""),
        text("models", "Models, with commas between; empty: all"),
        text("endpoints", "Endpoints such as chat, jobs; empty: all"),
        text("limited", "Limits such as requests_per_minute=60, tokens_per_day=100000; empty: none"),
        h("label", { class: "check" }, h("input", { type: "checkbox", name: "admin" }), "May administer: everything in this console"),
        problem,
        h("div", { class: "actions" },
          h("button", { type: "submit", class: "primary" }, "Create"),
          h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"))));
  }
}

/** Shows a new secret, the only time that anybody can. */
function reveal({ key, label, id, tenant }) {
  const field = h("input", { type: "text", class: "id", readonly: true, value: key, "aria-label": "The key", spellcheck: "false", onfocus: () => field.select() });
  const said = h("p", { class: "dim", role: "status" });
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(key);
      said.textContent = "Copied.";
    } catch { // a page without TLS may not, except on this machine
      field.focus();
      said.textContent = "The browser does not allow this. The key is selected: copy it by keyboard.";
    }
  };
  const dialog = opened("reveal", `Copy the key ${label || id} now`, { class: "wide", "aria-describedby": "reveal-words", oncancel: (event) => event.preventDefault() },
    h("p", { id: "reveal-words", class: "warn-text" }, "It is shown only this once, and nobody can look it up again. ", `Whoever has it acts as tenant ${tenant}.`),
    field, said,
    h("div", { class: "actions" },
      h("button", { type: "button", class: "primary", onclick: copy, autofocus: true }, "Copy key"),
      h("button", { type: "button", onclick: () => dialog.close() }, "I have stored it")));
}

function named(key) {
  return [key.label && h("div", { class: "wrap" }, key.label), key.id ? h("code", { class: key.label ? "dim" : null }, key.id) : [key.name, h("div", { class: "dim" }, "of the settings")]];
}

/** What a key may be used for. */
function scope({ admin, models, endpoints }) {
  if (admin) return h("span", { class: "strong" }, "everything, as admin");
  const some = [[models, "models"], [endpoints, "endpoints"]].filter(([names]) => names.length).map(([names, what]) => h("div", {}, h("span", { class: "dim" }, `${what}: `), names.join(", ")));
  return some.length ? some : "all of its tenant";
}

/** Every limit that a key or its row has, by name. */
function limits(key) {
  const known = Object.entries({ batch_tokens: key.batch_tokens, ...key.quotas, ...key.limits }).filter(([, value]) => value !== null && value !== undefined);
  return known.length ? known.map(([name, value]) => h("div", {}, h("span", { class: "dim" }, `${name.replaceAll("_", " ")}: `), typeof value === "number" ? value.toLocaleString("en") : String(value))) : "–";
}

function until({ revoked_at, expires_at }) {
  if (revoked_at) return ["revoked ", when(revoked_at)];
  return expires_at ? h("time", { datetime: new Date(expires_at * 1000).toISOString() }, new Date(expires_at * 1000).toLocaleDateString("en-GB", { dateStyle: "medium" })) : "never";
}

function storage(all) {
  return section("Storage", table("Storage of each tenant", [["Tenant", "head"], ["Jobs", "num"], ["Waiting", "num"], ["Running", "num"], ["Requests", "num"], ["Results", "num"], ["Files", "num"], ["Bytes of files", "num"]], all.map((one) => [one.tenant,
    tenantLink(one.tenant), limited(one.jobs, one.quotas.jobs, count), count(one.waiting), count(one.running),
    limited(one.job_bytes, one.quotas.job_bytes, bytes), limited(one.result_bytes, one.quotas.result_bytes, bytes), count(one.files), limited(one.file_bytes, one.quotas.file_bytes, bytes)])));
}

function limited(used, limit, shown) {
  const full = limit && used / limit > 0.9;
  return [h("span", { class: full ? "warn-text" : null }, shown(used)), limit !== null && limit !== undefined && h("span", { class: "dim" }, ` of ${shown(limit)}`)];
}
