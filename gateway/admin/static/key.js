// The form for a key. Both pages have it, and neither keeps what was typed in a field.

import { html } from "./vendor/lit-html/lit-html.js";

/** `use` gets the key that was typed. */
export function keyForm(title, label, trouble, use) {
  const submit = (event) => {
    event.preventDefault();
    const { key } = event.target.elements;
    const typed = key.value.trim();
    key.value = "";
    use(typed);
  };
  return html`<form class="panel key" @submit=${submit}>
    <h2>${title}</h2>
    <p>It stays in this page's memory until you close or reload it; it is not stored.</p>
    <label for="typed-key">${label}</label>
    <input id="typed-key" name="key" type="password" autocomplete="off" required maxlength="4096" aria-describedby="key-trouble">
    <p id="key-trouble" class="error" role="alert">${trouble}</p>
    <button type="submit" class="primary">Open</button>
  </form>`;
}

export function focusKey() {
  document.getElementById("typed-key").focus();
}
