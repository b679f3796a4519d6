// What all views share: the run as the server last described it, the names of clusters, and who wants to hear of changes.

import { get } from "./api.js";

export const store = { run: null, names: new Map() };

const listeners = new Set();

/** Called with (what) when labels, edits or the state of training changed; what is "version" or "run". */
export function onChange(listener) {
  listeners.add(listener);
}

function tell(what) {
  for (const listener of listeners) listener(what);
}

/** Ask the server how the run stands; tells the views when something changed. */
export async function look() {
  const before = store.run;
  const run = await get("/api/run");
  store.run = run;
  if (before?.version !== run.version) {
    await learnNames();
    tell("version");
  }
  tell("run");
}

async function learnNames() {
  const names = new Map();
  for (let page = 0; page < 20; page++) {
    const found = await get(`/api/clusters?show=named&sort=size&order=desc&page=${page}&per_page=100`);
    for (const card of found.clusters) names.set(card.id, card.name);
    if (names.size >= found.total || found.clusters.length === 0) break;
  }
  store.names = names;
}

/** What a cluster is called: its name, else its number. */
export function clusterName(id, name = store.names.get(id)) {
  if (id < 0) return "no cluster";
  return name || `cluster ${id}`;
}
