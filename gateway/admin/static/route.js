// Where the page is. An address is a fragment: "#/nodes/NAME?find=epyc", with the page, perhaps one of its
// things, and what the page has been told to show.

const LONGEST = 2048;
/** The state of an entry of the browser's history on which the reader has been. */
const SEEN = { seen: true };

/** The route of the address: `page`, `id` ("" for the page itself) and `query`. */
export let route = parse(location.hash);

export function parse(hash) {
  const [path, words = ""] = hash.slice(0, LONGEST).split(/\?(.*)/s);
  const [page, ...rest] = path.startsWith("#/") ? path.slice(2).split("/") : [""];
  return { page: page || "overview", id: decoded(rest.join("/")), query: new URLSearchParams(words) };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** The address of a page, or of one of its things. */
export function href(page, id = "", query = {}) {
  const words = String(new URLSearchParams(query));
  return `#/${page}${id === "" ? "" : `/${encodeURIComponent(id)}`}${words && `?${words}`}`;
}

/** Go to an address, as a link does. */
export function go(address) {
  location.hash = address;
}

/** Tell the address what this page shows, without an entry in the history; "" takes the word away. */
export function setQuery(name, value) {
  const query = new URLSearchParams(route.query);
  if (value === "") query.delete(name);
  else query.set(name, value);
  route = { ...route, query };
  try {
    history.replaceState(SEEN, "", href(route.page, route.id, query));
  } catch {
    // A browser that bounds how often an address may change; the page shows what was asked for all the same.
  }
}

/** Call this with each new address, and whether a link led there, not the way back. */
export function onMove(moved) {
  addEventListener("hashchange", () => {
    const isNew = history.state === null;
    history.replaceState(SEEN, "");
    route = parse(location.hash);
    moved(isNew);
  });
  history.replaceState(SEEN, "");
}
