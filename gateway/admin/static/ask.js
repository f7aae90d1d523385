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

/** An answer of the gateway that is an error, in its own words, perhaps with a list of problems. */
export class ApiError extends Error {
  constructor(status, message, problems = []) {
    super(message);
    Object.assign(this, { status, problems });
  }
}

/** `body` is sent as JSON, `form` (a FormData) as it is. */
export async function ask(method, path, { body, form, signal } = {}) {
  const options = { method, signal, body: form, cache: "no-store", credentials: "omit" };
  options.headers = headers(body === undefined ? {} : { "content-type": "application/json" });
  if (body !== undefined) options.body = JSON.stringify(body);
  const response = await fetch(path, options);
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  try {
    const body = await response.json();
    return new ApiError(response.status, body.error.message, body.problems);
  } catch {
    // It was no JSON.
    return new ApiError(response.status, `The gateway answered with status ${response.status}.`);
  }
}

/** The JSON of a path. */
export async function fetchJson(path, options) {
  return (await ask("GET", path, options)).json();
}
