// Questions of a page to the gateway that it came from. The key is kept in this module's memory alone.

const RETRY_SECONDS = 5;

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
  const response = await whole(fetch(path, options), signal);
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** What comes from the gateway; a browser's own words for what breaks off help nobody. */
async function whole(coming, signal) {
  try {
    return await coming;
  } catch (error) {
    throw signal?.aborted ? error : new Error("The gateway does not answer.");
  }
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
  return whole((await ask("GET", path, options)).json(), options?.signal);
}

/**
 * Ask at once, and again and again; a hidden page asks nothing after the first answer. `question` gets what fetches the
 * JSON of a path, and returns the seconds until it is asked again, if it is. `tell` gets, after each, the words of what
 * went wrong ("" for nothing) and the error. What this returns ends it: after that `tell` is not called any more.
 */
export function keepAsking(question, tell, retry = RETRY_SECONDS) {
  const stopped = new AbortController();
  const { signal } = stopped;
  const get = (path) => fetchJson(path, { signal });
  let timer = 0;
  const turn = async () => {
    let [pause, trouble] = [retry, null];
    try {
      pause = await question(get, signal);
    } catch (error) {
      trouble = error;
      // What was refused is refused again.
      if (error.status < 500 && error.status !== 429) pause = 0;
    }
    if (signal.aborted) return;
    tell(trouble?.message ?? "", trouble);
    if (pause) timer = setTimeout(wait, 1000 * pause);
  };
  const wait = () => {
    if (document.hidden) timer = setTimeout(wait, 1000);
    else turn();
  };
  turn();
  return () => {
    stopped.abort();
    clearTimeout(timer);
  };
}
