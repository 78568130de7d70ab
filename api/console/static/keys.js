// Keys and storage: who may use the server, up to which lane, and what each tenant stores. They are set in penstock.toml.

import { api, watch } from "./api.js";
import { bytes, count } from "./format.js";
import { draw, empty, failed, fromCode, h, heading, loading, section, table, tenantLink } from "./parts.js";

export function keys({ root, signal, title }) {
  title("Keys and storage");
  draw(root, heading("Keys and storage"), loading());
  const round = watch({
    signal, everyMs: 5000,
    read: async () => {
      const [found, tenants] = await Promise.all([api.get("/admin/keys", { signal }), api.get("/admin/tenants", { signal })]);
      return { keys: found.data, tenants: tenants.data };
    },
    show: (found, error) => draw(root, heading("Keys and storage"), error && failed(error, round), found && [keyTable(found.keys), storage(found.tenants),
      fromCode(["Terminal", "penstock tenants"], ["penstock.toml", "[keys.team-a]\nsha256 = \"...\"        # printf %s KEY | sha256sum\ntenant = \"team-a\"\npriority = \"standard\"   # the highest lane"])]),
  });
}

function keyTable(all) {
  if (!all.length) return section("Keys", empty("No keys are configured.", "The server answers only to this machine. Add a key in penstock.toml before others use it."));
  return section("Keys", table("Configured keys", [["Name"], ["Tenant"], ["Highest lane"], ["May administer"], ["Tokens of batches", "num"]], all.map((key) => h("tr", { key: key.name },
    h("th", { scope: "row" }, key.name), h("td", {}, tenantLink(key.tenant)), h("td", {}, key.highest_lane), h("td", {}, key.admin ? "yes" : "no"),
    h("td", { class: "num" }, key.batch_tokens === null ? "default" : count(key.batch_tokens))))));
}

function storage(all) {
  return section("Storage", table("Storage of each tenant", [["Tenant"], ["Jobs", "num"], ["Waiting", "num"], ["Running", "num"], ["Requests", "num"], ["Results", "num"], ["Files", "num"], ["Bytes of files", "num"]], all.map((one) => h("tr", { key: one.tenant },
    h("th", { scope: "row" }, tenantLink(one.tenant)), limited(one.jobs, one.limits.jobs, count), h("td", { class: "num" }, count(one.waiting)), h("td", { class: "num" }, count(one.running)),
    limited(one.job_bytes, one.limits.job_bytes, bytes), limited(one.result_bytes, one.limits.result_bytes, bytes), h("td", { class: "num" }, count(one.files)), limited(one.file_bytes, one.limits.file_bytes, bytes)))));
}

function limited(used, limit, shown) {
  const full = limit && used / limit > 0.9;
  return h("td", { class: "num" }, h("span", { class: full ? "warn-text" : null }, shown(used)), limit !== null && limit !== undefined ? h("span", { class: "dim" }, ` of ${shown(limit)}`) : null);
}
