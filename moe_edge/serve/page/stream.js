// Reads what the server answers; texts stay texts.

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// An error in OpenAI's shape, or whatever came instead.
export function errorOf(status, body) {
  const error = body?.error ?? {};
  return new ApiError(status, error.code ?? null, error.message ?? `the server said ${status}`);
}

export function headers(key) {
  const found = {"Content-Type": "application/json"};
  if (key) found.Authorization = `Bearer ${key}`;
  return found;
}

export async function getJson(path, key) {
  const response = await fetch(path, {headers: headers(key), cache: "no-store"});
  const body = await response.json().catch(() => null);
  if (!response.ok && path !== "health") throw errorOf(response.status, body);
  return body;
}

// Cuts server-sent events out of pieces of text that end anywhere.
export class Events {
  #rest = "";

  // The data of all events that are whole by now.
  add(piece) {
    const parts = (this.#rest + piece).split(/\r?\n\r?\n/);
    this.#rest = parts.pop();
    return parts.map(dataOf).filter((data) => data !== "");
  }
}

function dataOf(event) {
  const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).trimStart()).join("\n");
}

// What a chunk adds to an answer: text, what was thought, calls of tools as lines.
export function newsOf(choice) {
  const {content, reasoning_content: thought, tool_calls: calls} = choice?.delta ?? {};
  return {
    text: choice?.text ?? content ?? "",
    thought: thought ?? "",
    calls: (calls ?? []).map(({function: made}) => `${made.name}(${made.arguments})`),
  };
}

// Sends a request and gives its chunks, parsed, as they come; throws unless all came.
export async function* chunks(path, body, key, signal) {
  const options = {method: "POST", headers: headers(key), body: JSON.stringify(body), signal};
  const response = await fetch(path, options);
  if (!response.ok) {
    throw errorOf(response.status, await response.json().catch(() => null));
  }
  const events = new Events();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const {value, done} = await reader.read();
    if (done) throw new Error("the answer was cut off");
    for (const data of events.add(value)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw errorOf(200, chunk);
      yield chunk;
    }
  }
}
