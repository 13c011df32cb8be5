// A conversation with one of the models, streamed.

import { call, events, onNewKey } from "./api.js";

const byId = (id) => document.getElementById(id);
const messages = [];
let running = null;

async function listModels() {
  try {
    const { data } = await (await call("/v1/models")).json();
    byId("model").replaceChildren(...data.map(({ id }) => new Option(id, id)));
    show("");
  } catch (error) {
    show(error.message);
  }
}

function show(error) {
  byId("error").textContent = error;
  byId("error").hidden = !error;
}

function addTurn(role, text) {
  const turn = document.createElement("li");
  turn.className = role;
  turn.textContent = text;
  byId("turns").append(turn);
  turn.scrollIntoView({ block: "end" });
  return turn;
}

// The parts of an answer's turn: what the model thought (shown when there is some), what it says, and what that took.
function addAnswer() {
  const turn = addTurn("assistant", "");
  const thoughts = document.createElement("details");
  const summary = document.createElement("summary");
  summary.textContent = "Reasoning";
  thoughts.append(summary, document.createElement("span"));
  thoughts.hidden = true;
  const answer = document.createElement("span");
  const note = document.createElement("small");
  turn.append(thoughts, answer, note);
  return { turn, thoughts, answer, note };
}

function requestBody() {
  const system = byId("system").value.trim();
  return {
    model: byId("model").value,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    temperature: byId("temperature").valueAsNumber,
    max_tokens: byId("max-tokens").valueAsNumber,
    stream: true,
    stream_options: { include_usage: true },
  };
}

async function ask(question) {
  show("");
  messages.push({ role: "user", content: question });
  const asked = addTurn("user", question);
  running = new AbortController();
  byId("send").hidden = true;
  byId("stop").hidden = false;
  const view = addAnswer();
  try {
    await receive(view, running.signal);
  } catch (error) {
    if (error.name === "AbortError") view.note.textContent = "stopped";
    else show(error.message);
  } finally {
    running = null;
    byId("send").hidden = false;
    byId("stop").hidden = true;
  }
  if (view.answer.textContent) {
    messages.push({ role: "assistant", content: view.answer.textContent });
  } else {
    // Roles must alternate: a question without an answer is taken back, to be asked again.
    messages.pop();
    asked.remove();
    view.turn.remove();
    byId("question").value ||= question;
  }
}

async function receive({ turn, thoughts, answer, note }, signal) {
  const response = await call("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(requestBody()),
    signal,
  });
  const follow = () => turn.scrollIntoView({ block: "end" });
  let reason = "";
  for await (const { choices, usage } of events(response)) {
    const [choice] = choices;
    if (choice?.delta.reasoning_content) {
      thoughts.hidden = false;
      thoughts.lastChild.append(choice.delta.reasoning_content);
    }
    if (choice?.delta.content) {
      answer.append(choice.delta.content);
      follow();
    }
    reason = choice?.finish_reason ?? reason;
    if (usage) {
      const cached = usage.prompt_tokens_details.cached_tokens;
      note.textContent = `${usage.prompt_tokens} tokens in (${cached} cached), ${usage.completion_tokens} out, ${reason}`;
      follow();
    }
  }
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = byId("question").value.trim();
  if (!question || running) return;
  byId("question").value = "";
  ask(question);
});
byId("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("composer").requestSubmit();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  byId("turns").replaceChildren();
  show("");
});
onNewKey(listModels);
listModels();
