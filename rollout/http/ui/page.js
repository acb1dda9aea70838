// Poll the server once a second, pass new data to the charts and the samples, and keep the top line up to date.
import { ask, get, hasKey } from "./base.js";
import { Charts } from "./charts.js";
import { Samples } from "./samples.js";

const POLL_MS = 1000;
const MOST_LOOKS = 3600;

const looks = [];
const charts = new Charts(get("charts"), get("events"));
const samples = new Samples(get("groups"), get("group"), get("legend"));
let run = null;

// Set a text only if it differs: a screen reader would read an unchanged text again.
function say(id, text) {
  if (get(id).textContent !== text) get(id).textContent = text;
}

// Show a command that sends a request to this server, ready to paste into a shell.
function example(model) {
  const body = JSON.stringify({ model, prompt: "Once upon a time", n: 2, max_tokens: 32, logprobs: 0 });
  const key = hasKey() ? ' -H "Authorization: Bearer $TRUEROLL_HTTP_API_KEY"' : "";
  return `curl ${location.origin}/v1/completions${key} -d '${body.replaceAll("'", "'\\''")}'`;
}

function take(told) {
  if (run !== null && run !== told.run) location.reload(); // the server has restarted, so its groups count from 1 again
  run = told.run;
  const { time } = told.looks;
  for (let i = 0; i < time.length; i++) {
    looks.push(Object.fromEntries(Object.entries(told.looks).map(([name, column]) => [name, column[i]])));
  }
  looks.splice(0, looks.length - MOST_LOOKS);
  say("model", told.model);
  say("example", example(told.model));
  const last = looks.at(-1);
  if (last) {
    say("state", last.push === null ? last.state : `${last.state}, receiving weights ${last.push}`);
    get("state").dataset.state = last.state;
    say("weights", last.weight_version === null ? "" : `weights version ${last.weight_version}`);
  }
  charts.draw(looks, Number(get("range").value), told.now);
  samples.update(told.groups, told.first_group);
  get("none").hidden = samples.count > 0;
  get("both").hidden = get("legend").hidden = samples.count === 0;
}

async function poll() {
  try {
    if (!document.hidden) take(await ask(`/ui/live?since=${looks.at(-1)?.time ?? 0}&after=${samples.last}`));
    get("trouble").hidden = true;
  } catch (error) {
    get("trouble").textContent = error instanceof TypeError ? "The server does not answer." : error.message;
    get("trouble").hidden = false;
  }
  setTimeout(poll, POLL_MS);
}

get("range").onchange = () => charts.draw(looks, Number(get("range").value), looks.at(-1)?.time ?? 0);
get("copy").hidden = !navigator.clipboard; // browsers offer it to secure origins only
get("copy").onclick = async () => {
  await navigator.clipboard.writeText(get("example").textContent);
  get("copy").textContent = "Copied";
};
document.onvisibilitychange = () => charts.fit();
poll();
