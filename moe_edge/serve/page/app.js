// The form, and answers as they come. Nothing is stored; texts are set as texts.

import {ExpertsPanel} from "./experts.js";
import {chunks, getJson, newsOf} from "./stream.js";

const HEALTH_MS = 5000;
const SHOW_MS = 500;  // figures of an answer that still grows
const $ = (id) => document.getElementById(id);
const key = () => $("key").value.trim();
const kind = () => document.querySelector("input[name=kind]:checked").value;
const panel = new ExpertsPanel(key);

let model = null;       // its entry of /v1/models
let refused = false;    // the key of the moment is not the server's
let running = null;     // AbortController of the request under way
let conversation = [];  // messages so far, of a chat

// What the server is.

async function askModel() {
  try {
    const {data} = await getJson("v1/models", key());
    model = data[0];
    const {k, max_context: context, lossless} = model.moe_edge;
    const exact = lossless ? "lossless" : "lossy route";
    $("model").textContent = `${model.id} · K ${k} · ${context} tokens of context · ${exact}`;
    $("floor").max = k;
    $("floor").value = k;
    showFloor();
    $("max-tokens").max = context;
    $("key-box").open = false;
  } catch (error) {
    $("model").textContent = error.message;
    if (error.status === 401) askForKey();
  }
}

function askForKey() {
  refused = true;
  $("key-box").open = true;
  $("key").focus();
}

async function askHealth() {
  let text = "no answer", state = "failed";
  try {
    const health = await getJson("health", "");
    state = health.status;
    text = state === "ok" ? `${health.running} running, ${health.waiting} waiting` : state;
    if (state === "ok" && !model && !refused) await askModel();
  } catch {
    // the server is gone: said above
  }
  if ($("health-text").textContent !== text) $("health-text").textContent = text;
  $("health").dataset.state = state;
}

function showFloor() {
  const {value, max} = $("floor");
  $("floor-value").textContent = `K ≥ ${value} of ${max}`;
}

function showKind() {
  const isChat = kind() === "chat";
  $("prompt-label").textContent = isChat ? "Message" : "Text to continue";
  $("forget").hidden = !isChat || conversation.length === 0;
}

// A request.

function requestOf(prompt) {
  const common = {
    model: model.id,
    max_tokens: $("max-tokens").valueAsNumber,
    temperature: $("temperature").valueAsNumber,
    min_k: $("floor").valueAsNumber,
    stream: true,
    stream_options: {include_usage: true},
  };
  if (kind() === "completion") return ["v1/completions", {...common, prompt}];
  const messages = [...conversation, {role: "user", content: prompt}];
  return ["v1/chat/completions", {...common, messages}];
}

async function send() {
  if (running) return;
  if (!model) await askModel();
  if (!model) return;
  const prompt = $("prompt").value;
  const [path, body] = requestOf(prompt);
  const answer = new Answer(kind(), prompt, body.min_k);
  running = new AbortController();
  showRunning(true);
  try {
    for await (const chunk of chunks(path, body, key(), running.signal)) answer.add(chunk);
    answer.finish();
    if (body.messages) $("prompt").value = "";
  } catch (error) {
    if (error.name === "AbortError") answer.finish("stop button");
    else answer.fail(error);
    if (error.status === 401) askForKey();
  }
  if (body.messages && answer.content) {
    conversation = [...body.messages, {role: "assistant", content: answer.content}];
  }
  running = null;
  showRunning(false);
  showKind();
  panel.refresh();
}

function showRunning(is) {
  $("send").disabled = is;
  $("stop").disabled = !is;
  $("progress").textContent = is ? "Writing …" : "Done.";
  // Not on a phone, where it would open the keyboard over the answer.
  if (!is && matchMedia("(pointer: fine)").matches) $("prompt").focus();
}

// One answer: its text as it grows, then its figures.
class Answer {
  content = "";
  #isChat;
  #node;
  #text;
  #pieces = 0;  // of text: one a step, as a rule
  #shown_ms = 0;
  #sent_ms = performance.now();
  #first_ms = null;
  #last_ms = null;
  #usage = null;
  #ended = null;

  constructor(kind, prompt, floor) {
    this.#isChat = kind === "chat";
    this.#node = $("answer").content.firstElementChild.cloneNode(true);
    this.#find("h3").textContent = `${this.#isChat ? "Chat" : "Completion"}, floor ${floor}`;
    this.#find(".question").textContent = prompt;
    this.#text = document.createTextNode("");
    this.#find(".text").append(this.#text);
    this.#node.classList.add("running", kind);
    $("answers").prepend(this.#node);
    $("no-answers").hidden = true;
  }

  #find(selector) {
    return this.#node.querySelector(selector);
  }

  add({choices, usage}) {
    const choice = choices?.[0];
    const {text: piece, thought, calls} = newsOf(choice);
    if (thought) this.#append(".thoughts", thought);
    for (const call of calls) this.#append(".calls", `${call}\n`);
    if (piece || thought || calls.length) {
      this.#last_ms = performance.now();
      this.#first_ms ??= this.#last_ms;
      this.#pieces++;
      // A message's first empty lines say nothing; a text is continued as it is.
      const isStart = this.#isChat && !this.content.trim();
      this.content += piece;
      this.#text.appendData(isStart ? piece.trimStart() : piece);
      if (this.#last_ms - this.#shown_ms > SHOW_MS) this.#figures();
    }
    this.#ended = choice?.finish_reason ?? this.#ended;
    this.#usage = usage ?? this.#usage;
  }

  // Text of a part that most answers have not.
  #append(part, text) {
    const node = this.#find(part);
    node.hidden = false;
    node.querySelector("p").append(text);
  }

  finish(by = null) {
    this.#ended = by ?? this.#usage?.moe_edge?.ended_by ?? this.#ended;
    this.#node.classList.remove("running");
    this.#figures();
  }

  fail({message, code}) {
    const error = this.#find(".error");
    error.textContent = code ? `${message} (${code})` : message;
    error.hidden = false;
    this.finish("error");
  }

  #figures() {
    this.#shown_ms = performance.now();
    const usage = this.#usage, own = usage?.moe_edge;
    const found = [];
    if (this.#first_ms !== null) {
      found.push(["First token", `${Math.round(this.#first_ms - this.#sent_ms)} ms`]);
    }
    const seen_ms = this.#last_ms - this.#first_ms;
    if (own?.tpot_ms) found.push(["Tokens/s", (1000 / own.tpot_ms).toFixed(1)]);
    else if (seen_ms > 0) {
      found.push(["Tokens/s", `about ${Math.round(1000 * (this.#pieces - 1) / seen_ms)}`]);
    }
    if (usage) found.push(["New tokens", usage.completion_tokens]);
    if (own && own.k_mean !== null) found.push(["K", kText(own)]);
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
      found.push(["Prompt", `${usage.prompt_tokens} (${cached} cached)`]);
    }
    if (own?.substituted_share) {
      found.push(["Substituted", `${(100 * own.substituted_share).toFixed(1)} %`]);
    }
    if (this.#ended) found.push(["Ended by", this.#ended]);
    this.#find("dl").replaceChildren(...found.map(([name, value]) => {
      const pair = document.createElement("div");
      const term = document.createElement("dt");
      const detail = document.createElement("dd");
      term.textContent = name;
      detail.textContent = value;
      pair.append(term, detail);
      return pair;
    }));
  }
}

function kText({k_min: least, k_mean: mean, k_max: most}) {
  return least === most ? `${most}` : `${least} to ${most}, mean ${mean.toFixed(1)}`;
}

// What the user does.

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("forget").addEventListener("click", () => {
  conversation = [];
  $("progress").textContent = "A new conversation begins with the next message.";
  showKind();
  $("prompt").focus();
});
$("floor").addEventListener("input", showFloor);
$("key").addEventListener("change", async () => {
  refused = false;
  await askModel();
  panel.refresh();
});
for (const radio of document.querySelectorAll("input[name=kind]")) {
  radio.addEventListener("change", showKind);
}
setInterval(() => {
  if (document.visibilityState === "visible") askHealth();
}, HEALTH_MS);

showKind();
askHealth();
panel.refresh();
