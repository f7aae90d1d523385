// Which colours hold, as a canvas takes them.

const dark = matchMedia("(prefers-color-scheme: dark)");
const forced = matchMedia("(forced-colors: active)");

/** Words that change when the colours do. */
export function theme() {
  const chosen = document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
  return forced.matches ? `${chosen} forced` : chosen;
}

/** Call `changed` when the system's colours change. */
export function onSystemTheme(changed) {
  dark.addEventListener("change", changed);
  forced.addEventListener("change", changed);
}

/** The value of a colour of the style sheet, such as "--edge"; it makes the browser compute styles. */
export function colour(name, isKept = false) {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  // Where the system forces its colours, some keep theirs, as the cells do.
  if (isKept) probe.style.forcedColorAdjust = "none";
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}
