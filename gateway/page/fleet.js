// The workers, as the router sees them, once a second while somebody looks.

import { call, onNewKey } from "./api.js";

const INTERVAL_MS = 1000;
const byId = (id) => document.getElementById(id);
let asking = false;

async function refresh() {
  // A slow server is asked once at a time, and for a hidden page not at all.
  if (asking || document.hidden) return;
  asking = true;
  let failure = "";
  try {
    draw(await (await call("/fleet")).json());
  } catch (error) {
    failure = error.message;
  } finally {
    asking = false;
  }
  byId("fleet-error").textContent = failure;
  byId("fleet-error").hidden = !failure;
}

function draw({ waiting, workers }) {
  const sum = (field) => workers.reduce((total, worker) => total + worker[field], 0);
  byId("waiting").textContent = waiting + sum("waiting");
  byId("running").textContent = sum("running");
  byId("hits").textContent = share(sum("prefix_cache_hits"), sum("prefix_cache_queries"));
  byId("workers").replaceChildren(...workers.map(card));
}

function card(worker) {
  const { kv_blocks: blocks } = worker;
  const item = byId("worker").content.cloneNode(true).firstElementChild;
  item.querySelector("b").textContent = worker.address;
  const state = item.querySelector(".state");
  state.textContent = worker.ready ? `${worker.running} running, ${worker.waiting} waiting` : "away";
  state.classList.toggle("away", !worker.ready);
  const percent = (count) => (blocks.total ? (100 * count) / blocks.total : 0);
  const used = item.querySelector("rect.used");
  const cached = item.querySelector("rect.cached");
  used.setAttribute("width", percent(blocks.used));
  cached.setAttribute("x", percent(blocks.used));
  cached.setAttribute("width", percent(blocks.cached));
  const told = `${blocks.used} used, ${blocks.cached} cached, ${blocks.free} free`;
  item.querySelector("svg").setAttribute("aria-label", `KV blocks: ${told}`);
  const hits = share(worker.prefix_cache_hits, worker.prefix_cache_queries);
  item.querySelector(".figures").textContent = `${told}; prefix hits ${hits}`;
  return item;
}

function share(part, whole) {
  return whole ? `${Math.round((100 * part) / whole)}\u00a0%` : "–";
}

onNewKey(refresh);
document.addEventListener("visibilitychange", refresh);
setInterval(refresh, INTERVAL_MS);
refresh();
