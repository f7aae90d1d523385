// Which colours hold, as a canvas takes them.

const dark = matchMedia("(prefers-color-scheme: dark)");

/** A word that changes when the colours do. */
export function theme() {
  return document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
}

/** Call `changed` when the system's colours change. */
export function onSystemTheme(changed) {
  dark.addEventListener("change", changed);
}

/** The value of a colour of the style sheet, such as "--edge"; it makes the browser compute styles. */
export function colour(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}
