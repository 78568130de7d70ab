// Login: takes the secret of a link out of the address, or an admin key from a form.

import { login, session } from "./api.js";
import { draw, h, loading } from "./parts.js";

/** Shows the form; resolves after a login. */
export function signIn(root, note = "") {
  document.title = "Log in - Penstock";
  document.body.classList.add("out");
  return new Promise((resolve) => {
    async function submit(event) {
      event.preventDefault();
      const field = event.target.elements.key;
      if (!field.value.trim()) { show("Enter an admin key.", true); return; }
      try {
        await login({ key: field.value.trim() });
        field.value = "";
        done();
      } catch (error) {
        show(error.message, true);
      }
    }
    function done() {
      document.body.classList.remove("out");
      resolve();
    }
    function show(error, bad) {
      draw(root, h("form", { class: "card login", onsubmit: submit, novalidate: true },
        h("h1", {}, "Log in"),
        h("p", {}, "On the machine where Penstock runs, ", h("code", {}, "penstock console"), " opens this page logged in."),
        h("label", { class: "field" }, h("span", {}, "Or enter an admin key"),
          h("input", { name: "key", type: "password", autocomplete: "off", spellcheck: "false", "aria-describedby": "login-help login-error", "aria-invalid": bad ? "true" : null })),
        h("p", { id: "login-help", class: "dim" }, "A key with admin = true, or without keys the admin token of this start."),
        h("p", { id: "login-error", class: "bad-text", role: "alert" }, error),
        h("button", { class: "primary", type: "submit" }, "Log in")));
      root.querySelector("input").focus();
    }
    const link = new URLSearchParams(location.hash.slice(1)).get("link");
    if (!link) { show(note, false); return; }
    const forget = () => history.replaceState(null, "", location.pathname + location.search);
    draw(root, loading());
    login({ link }).then(() => { forget(); done(); }, (error) => {
      if (error.status === 401) forget(); // otherwise a reload tries it again
      if (error.status === 401 && session.token) done(); // a link that this browser has used: its session may go on
      else show(error.message, false);
    });
  });
}
