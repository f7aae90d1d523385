// Questions of a page to the gateway that it came from. The key is kept in this module's memory alone.

let typedKey = "";

export function setKey(key) {
  // As the bytes of UTF-8: a header takes no other characters, and the page would look cut off.
  const bytes = new TextEncoder().encode(key.trim());
  typedKey = Array.from(bytes, (byte) => String.fromCharCode(byte)).join("").replaceAll("\0", "");
}

export function hasKey() {
  return typedKey !== "";
}

function headers(more = {}) {
  return typedKey ? { ...more, authorization: `Bearer ${typedKey}` } : more;
}

/** An answer of the gateway that is an error, in its own words. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function ask(method, path, { body, signal } = {}) {
  const options = { method, signal, cache: "no-store", credentials: "omit" };
  options.headers = headers(body === undefined ? {} : { "content-type": "application/json" });
  if (body !== undefined) options.body = JSON.stringify(body);
  const response = await fetch(path, options);
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  let message = `The gateway answered with status ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // It was no JSON.
  }
  return new ApiError(response.status, message);
}

/** The JSON of a path. */
export async function fetchJson(path, options) {
  return (await ask("GET", path, options)).json();
}
