// Numbers and foreign text as people read them.

const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

/** Foreign text with its control and direction characters made visible. */
export function plain(value) {
  return String(value ?? "").replace(UNSEEN, (character) => {
    const code = character.charCodeAt(0);
    return code < 0x20 ? String.fromCharCode(0x2400 + code) : "\ufffd";
  });
}

/** Who sent a request: the key's name and id, or what stands for a caller without a key. */
export function callerName({ caller, caller_name: name }) {
  return name === null || name === undefined || name === caller ? plain(caller) : `${plain(name)} (${plain(caller)})`;
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10_000) return String(Math.round(value));
  if (value < 1_000_000) return `${trimmed(value / 1000)}k`;
  return `${trimmed(value / 1_000_000)}M`;
}

function trimmed(value) {
  return value < 100 ? value.toFixed(1).replace(/\.0$/, "") : String(Math.round(value));
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  if (value < 172_800) return `${(value / 3600).toFixed(1)} h`;
  return `${Math.round(value / 86_400)} days`;
}

/** A time as text of RFC 3339, by the reader's clock; the day too, unless it is that of `now` (in seconds). */
export function moment(text, now) {
  const at = new Date(text);
  const day = at.toDateString() === new Date(now * 1000).toDateString() ? "" : `${at.toLocaleDateString()} `;
  return `${day}${at.toLocaleTimeString()}`;
}

export function size(bytes) {
  const gib = bytes / 2 ** 30;
  return gib >= 100 ? `${Math.round(gib)} GiB` : gib >= 1 ? `${gib.toFixed(1)} GiB` : `${Math.round(bytes / 2 ** 20)} MiB`;
}

export function rate(value) {
  if (value === null || value === undefined) return "–";
  return value < 100 ? value.toFixed(1) : String(Math.round(value));
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${Math.round(100 * share)} %`;
}

export function money(value) {
  if (value === null || value === undefined) return "–";
  return value >= 100 ? value.toFixed(0) : value >= 1 ? value.toFixed(2) : value.toPrecision(2);
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}
