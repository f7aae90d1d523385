// What the page knows: the last snapshot, kept up to date by the updates that follow it.

const MOST_POINTS = 720;

export const state = {
  /** "connecting", "live", "lost" or "key". */
  connection: "connecting",
  trouble: "",
  role: "viewer",
  at: 0,
  nodes: new Map(),
  requests: new Map(),
  summary: null,
  waiting: [],
  problems: [],
  history: { step: 5, columns: [], points: [] },
  /** Goes up with each change of the nodes, of the requests, of the history, and of what the page itself has been told. */
  versions: { nodes: 0, requests: 0, history: 0, page: 0 },
};

let versions = 0;

export function takeHello(hello) {
  state.role = hello.role;
}

export function takeSnapshot(snapshot) {
  state.nodes = new Map();
  state.requests = new Map();
  merge(state.nodes, "name", snapshot.nodes, []);
  merge(state.requests, "id", snapshot.requests ?? [], []);
  state.history = snapshot.history;
  state.at = snapshot.at;
  state.summary = snapshot.summary;
  state.waiting = snapshot.waiting;
  state.problems = snapshot.problems;
  for (const name of Object.keys(state.versions)) state.versions[name] += 1;
}

export function takeUpdate(update) {
  state.at = update.at;
  if (update.nodes || update.gone_nodes) {
    merge(state.nodes, "name", update.nodes ?? [], update.gone_nodes ?? []);
    state.versions.nodes += 1;
  }
  if (update.requests || update.ended_requests) {
    merge(state.requests, "id", update.requests ?? [], update.ended_requests ?? []);
    state.versions.requests += 1;
  }
  for (const name of ["summary", "waiting", "problems"]) {
    if (update[name] !== undefined) state[name] = update[name];
  }
  if (update.point) {
    const { points } = state.history;
    points.push(update.point);
    if (points.length > MOST_POINTS) points.splice(0, points.length - MOST_POINTS);
    state.versions.history += 1;
  }
}

function merge(rows, key, changed, gone) {
  for (const name of gone) rows.delete(name);
  for (const change of changed) {
    versions += 1;
    const row = rows.get(change[key]);
    if (row === undefined) rows.set(change[key], { ...change, version: versions });
    else Object.assign(row, change, { version: versions });
  }
}

/** The nodes without the models of routers, which are rows of their own. */
export function nodesAlone() {
  return [...state.nodes.values()].filter((node) => node.router === undefined);
}

export function isOperator() {
  return state.role !== "viewer";
}
