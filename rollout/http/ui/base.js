// What all of the page uses: making elements, and asking the server, with its key if it has one.
const KEY = "trueroll-key";
export const get = (id) => document.getElementById(id);

// An element. Children are text or elements: nothing is ever read as markup.
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// A time of the day; `seconds` since 1970.
export function clock(seconds) {
  return new Date(1000 * seconds).toLocaleTimeString("en-GB");
}

export async function ask(path, body) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
    const method = body === undefined ? "GET" : "POST";
    const reply = await fetch(path, { method, headers, body: body && JSON.stringify(body), cache: "no-store" });
    if (reply.status === 401) {
      if (key === sessionStorage.getItem(KEY)) await askKey(key !== null);
      continue;
    }
    const told = await reply.json();
    if (!reply.ok) throw new Error(told.error.message);
    return told;
  }
}

let asking = null;

function askKey(wasWrong) {
  asking ??= new Promise((resolve) => {
    get("wrong").textContent = wasWrong ? "That was not the key of this server." : "";
    get("ask").showModal();
    get("ask").oncancel = (event) => event.preventDefault(); // nothing can be shown without it
    get("ask").querySelector("form").onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, get("key").value.trim());
      get("key").value = "";
      get("ask").close();
      asking = null;
      resolve();
    };
  });
  return asking;
}
