// The latest groups: prompt and samples, token by token, and whether scoring them again gives the same bits.
import { ask, clock, make } from "./base.js";

// Lower bounds of probability. A token gets the shade of the first bound that its probability reaches.
const SHADES = [0.9, 0.5, 0.2, 0.05, 0.01, 0.001, 0];
// Invisible characters, and characters that change the direction of the text around them.
const HIDDEN = new RegExp(
  "[\\0-\\x08\\x0b-\\x1f\\x7f-\\x9f\\xad\\u061c\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e" +
    "\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb\\u{e0000}-\\u{e007f}]", "gu",
);
const number = (value) => value.toLocaleString("en");
const plural = (value, word) => `${number(value)} ${word}${value === 1 ? "" : "s"}`;

// Return the shortest decimal that parses to the same float32.
function exact(value) {
  let digits = 1;
  while (digits < 9 && Math.fround(value.toPrecision(digits)) !== value) digits++;
  return value.toPrecision(digits);
}

function named(character) {
  const code = character.codePointAt(0);
  if (code < 32) return String.fromCodePoint(0x2400 + code);
  return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
}

const visible = (text) => text.replace(HIDDEN, named).replace(/\n/g, "↵\n");

function shade(logprob) {
  return `p${SHADES.findIndex((least) => Math.exp(logprob) >= least)}`;
}

// Return the distinct versions in order.
const versionsOf = (spans) => [...new Set(spans.map(([version]) => version))].join(" → ");

// Return a line of facts. Each fact stays on one line if it fits.
function factsOf(facts) {
  const parts = facts.map((fact, i) => make("span", {}, i + 1 < facts.length ? `${fact} ·` : fact));
  return make("p", { className: "dim facts" }, ...parts.flatMap((part) => [part, " "]));
}

function scoreButton(text) {
  const button = make("button", { type: "button", title: "Compute the log-probs anew, and compare their bits" }, text);
  button.setAttribute("aria-describedby", "about-score");
  return button;
}

export class Samples {
  constructor(list, place, legend) {
    this.list = list;
    this.place = place;
    this.last = 0;
    this.chosen = null;
    const named = (least, i) => make("span", { className: `t p${i}` }, least ? `≥ ${100 * least}` : "less");
    legend.append(...SHADES.map(named), make("span", { className: "t cached" }, "cached"));
    list.onkeydown = (event) => this.move(event);
  }

  get count() {
    return this.list.childElementCount;
  }

  update(groups, first) {
    for (const group of groups) {
      this.last = group.id;
      this.list.prepend(this.line(group));
    }
    while (this.count && Number(this.list.lastElementChild.dataset.id) < first) this.list.lastElementChild.remove();
    if (this.count && !this.list.querySelector("[tabindex='0']")) this.list.querySelector("button").tabIndex = 0;
    if (this.chosen === null && this.count) this.choose(groups.at(-1).id, this.list.querySelector("button"));
  }

  line(group) {
    const facts = [
      plural(group.num_samples, "sample"), plural(group.num_tokens, "token"),
      `weights ${group.versions.join(", ")}`, group.finish_reasons.join(", "),
    ];
    const top = make("span", { className: "top" }, make("b", {}, `#${group.id}`), ` ${clock(group.seconds)}`);
    const preview = make("bdi", { className: "preview" }, visible(group.preview));
    const told = make("span", { className: "dim" }, facts.join(" · "));
    const button = make("button", { type: "button", tabIndex: -1 }, top, preview, told); // focused with the arrow keys
    button.onclick = async () => {
      await this.choose(group.id, button);
      if (this.place.getBoundingClientRect().top > innerHeight / 2) this.place.scrollIntoView(); // on a phone
    };
    const line = make("li", {}, button);
    line.dataset.id = group.id;
    return line;
  }

  move(event) {
    const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    const next = step && event.target.closest("li")?.[step];
    if (!next) return;
    event.preventDefault();
    next.querySelector("button").focus();
  }

  async choose(id, button) {
    this.chosen = id;
    for (const each of this.list.querySelectorAll("[tabindex='0']")) {
      each.removeAttribute("aria-current");
      each.tabIndex = -1;
    }
    button.setAttribute("aria-current", "true");
    button.tabIndex = 0;
    try {
      const told = await ask(`/ui/group?group=${id}`);
      if (this.chosen === id) this.show(told);
    } catch (error) {
      if (this.chosen === id) this.place.replaceChildren(make("p", { className: "bad" }, error.message));
    }
  }

  show(group) {
    const params = Object.entries(group.params);
    const facts = [["seed", group.seed], ...params].map(([name, value]) => `${name} ${value ?? "not given"}`);
    const all = scoreButton("Score all again");
    const cards = group.samples.map((sample) => new Sample(group, sample));
    all.onclick = () => cards.forEach((card) => card.score());
    const cached = Math.max(0, ...group.samples.map((sample) => sample.num_cached_tokens));
    const prompt = new Tokens(group.id, null, group.num_prompt_tokens, "Prompt", [], cached);
    const size = `${plural(group.num_prompt_tokens, "token")}, ${number(cached)} of them cached`;
    const images = group.images.map(({ start, picture }, i) =>
      make("img", { src: picture, alt: `Image ${i + 1}, at token ${start}`, title: `Image ${i + 1}, at token ${start}` }));
    const unseen = group.num_images - images.length;
    const rest = make("small", { hidden: !unseen }, `${plural(unseen, "image")} not shown`);
    const pictures = make("div", { className: "images", hidden: !group.num_images }, ...images, rest);
    const left = group.num_asked - group.samples.length;
    const missing = make("p", { className: "dim", hidden: !left }, `${plural(left, "more sample")} not kept.`);
    this.place.replaceChildren(
      make("div", { className: "bar" }, make("h3", {}, `Group ${group.id}`), all),
      factsOf(facts),
      make("section", { className: "prompt" }, make("h4", {}, "Prompt ", make("small", {}, size)), pictures, prompt.place),
      missing,
      make("div", { className: "cards" }, ...cards.map((card) => card.place)),
    );
  }
}

// One sample of a group, with its button for scoring.
class Sample {
  constructor(group, sample) {
    Object.assign(this, { group, sample });
    const { index, stop_reason: reason, mean_logprob: mean } = sample;
    const cause = typeof reason === "number" ? `token ${reason}` : `“${visible(reason ?? "")}”`;
    const why = reason === null ? "" : ` (${cause})`;
    const facts = [`weights ${versionsOf(sample.weight_versions)}`, `${plural(sample.num_cached_tokens, "prompt token")} cached`];
    if (mean !== null) facts.push(`mean log-prob ${mean.toFixed(3)}`);
    facts.push(`seed ${sample.seed}`);
    this.button = scoreButton("Score again");
    this.button.disabled = !sample.num_tokens;
    this.button.setAttribute("aria-label", `Score sample ${index} again`);
    this.button.onclick = () => this.score();
    this.result = make("p", { className: "result", role: "status" });
    this.tokens = new Tokens(group.id, index, sample.num_tokens, `Sample ${index}`, sample.weight_versions, 0);
    const end = make("span", { className: `end ${sample.finish_reason}` }, `${sample.finish_reason}${why}`);
    const head = make("h4", {}, `Sample ${index} `, make("small", {}, plural(sample.num_tokens, "token"), " ", end));
    const error = make("p", { className: "bad", hidden: sample.error === null }, visible(sample.error ?? ""));
    this.place = make(
      "section", { className: "card" }, make("div", { className: "bar" }, head, this.button),
      factsOf(facts), error, this.result, this.tokens.place,
    );
  }

  async score() {
    if (this.button.disabled) return;
    this.button.disabled = true;
    this.say("", "Scoring …");
    try {
      this.tell(await ask("/ui/score", { group: this.group.id, sample: this.sample.index }));
    } catch (error) {
      this.say("bad", error.message);
    }
    this.button.disabled = false;
  }

  tell(told) {
    const then = versionsOf(this.sample.weight_versions);
    const now = versionsOf(told.weight_versions);
    if (told.logprobs) {
      this.tokens.shadeBy(told.logprobs);
      this.say("", `Nothing to compare: the request asked for no log-probs. Tokens are shaded by weights ${now}.`);
      return;
    }
    const where = `weights ${now}`;
    if (told.difference === null) {
      this.say("good", `✓ Same bits: ${plural(told.num_compared, "log-prob")}, ${where}.`);
      return;
    }
    const [at, before, again] = told.difference;
    this.tokens.point(at);
    const first = `Token ${at} is the first that differs: ${exact(before)} then, ${exact(again)} now.`;
    const differs = `${told.num_equal} of ${told.num_compared} have the same bits. ${first}`;
    if (then === now) this.say("bad", `✗ Different bits with the same ${where}: ${differs}`);
    else this.say("changed", `Sampled with weights ${then}, scored with ${now}: log-probs differ as expected. ${differs}`);
  }

  say(kind, text) {
    this.result.className = `result ${kind}`;
    this.result.textContent = text;
  }
}

// Tokens of a prompt or a sample, fetched in parts, and a line with details of the selected token.
class Tokens {
  constructor(group, sample, total, name, spans, cached) {
    Object.assign(this, { total, spans, cached, tokens: [], at: null, logprobs: null });
    this.path = `/ui/tokens?group=${group}${sample === null ? "" : `&sample=${sample}`}`;
    this.box = make("div", { className: "tokens", tabIndex: 0, dir: "auto" });
    this.box.setAttribute("role", "group");
    this.box.setAttribute("aria-label", `${name}: tokens; select one with the arrow keys`);
    this.box.onclick = (event) => this.point(this.tokens.findIndex(({ span }) => span === event.target));
    this.box.onkeydown = (event) => this.move(event);
    this.about = make("p", { className: "about dim", ariaLive: "polite" });
    this.more = make("button", { type: "button", hidden: true });
    this.more.onclick = () => this.fetch();
    this.place = make("div", {}, this.box, this.more, this.about);
    this.fetch();
  }

  async fetch() {
    this.more.disabled = true;
    try {
      this.add(await ask(`${this.path}&start=${this.tokens.length}`));
    } catch (error) {
      this.about.textContent = error.message;
    }
    const left = this.total - this.tokens.length;
    this.more.disabled = false;
    this.more.hidden = left === 0;
    this.more.textContent = `Show more: ${plural(left, "token")} left`;
  }

  add({ token_ids: ids, texts, logprobs }) {
    const parts = [];
    ids.forEach((id, i) => {
      const at = this.tokens.length;
      const logprob = logprobs?.[i] ?? this.logprobs?.[at];
      const span = make("span", { className: "t" }, texts[i] === "" ? "·" : visible(texts[i]));
      if (logprob !== undefined) span.classList.add(shade(logprob));
      if (at < this.cached) span.classList.add("cached");
      const begun = this.spans.length > 1 && this.spans.find(([, start]) => start === at);
      if (begun) parts.push(make("span", { className: "version" }, `weights ${begun[0]}`));
      parts.push(span);
      this.tokens.push({ span, id, text: texts[i], logprob });
    });
    this.box.append(...parts);
  }

  shadeBy(logprobs) {
    this.logprobs = logprobs;
    this.tokens.forEach((token, at) => {
      token.logprob = logprobs[at];
      token.span.className = `t ${shade(logprobs[at])}`;
    });
  }

  move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    this.point(Math.min(Math.max((this.at ?? -1) + step, 0), this.tokens.length - 1));
  }

  point(at) {
    const token = this.tokens[at];
    if (!token) return;
    this.tokens[this.at]?.span.classList.remove("at");
    this.at = at;
    token.span.classList.add("at");
    const { box } = this;
    const below = token.span.offsetTop - box.scrollTop;
    if (below < 0 || below > box.clientHeight - 20) box.scrollTop += below - box.clientHeight / 2;
    const facts = [`token ${at}`, `id ${token.id}`, `“${visible(token.text).replace(/\n/g, "")}”`];
    const { logprob } = token;
    const chance = (100 * Math.exp(logprob)).toPrecision(3);
    if (logprob !== undefined) facts.push(`log-prob ${exact(logprob)}`, `${chance} %`);
    const drawn = this.spans.find(([, start, end]) => start <= at && at < end);
    if (drawn) facts.push(`weights ${drawn[0]}`);
    this.about.textContent = facts.join(" · ");
  }
}
