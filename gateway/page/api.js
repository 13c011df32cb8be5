// Calls of this server's API, with the key that stands in the page.

const key = document.getElementById("key");
key.value = sessionStorage.getItem("key") ?? "";
key.form.addEventListener("submit", (event) => event.preventDefault());

// Calls `listener` when another key was typed. The key is kept until the tab is closed, and goes nowhere else.
export function onNewKey(listener) {
  key.addEventListener("change", () => {
    sessionStorage.setItem("key", key.value.trim());
    listener();
  });
}

// Fetches a path; throws an Error with the server's words when it is refused.
export async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (key.value.trim()) headers.authorization = `Bearer ${key.value.trim()}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Error(body?.error?.message ?? `The server answered ${response.status}.`);
}

// Yields the JSON objects of a server-sent event stream; throws when one is an error, or when the last is missing.
export async function* events(response) {
  let rest = "";
  for await (const text of chunks(response.body.pipeThrough(new TextDecoderStream()))) {
    const blocks = (rest + text).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue; // a comment that keeps the connection alive
      if (block === "data: [DONE]") return;
      const event = JSON.parse(block.slice("data: ".length));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
  throw new Error("The answer broke off.");
}

// Not every browser can iterate over a stream by itself.
async function* chunks(stream) {
  const reader = stream.getReader();
  for (let read = await reader.read(); !read.done; read = await reader.read()) yield read.value;
}
