// Shared by the whole page: create elements, and send requests to the server, with the API key if it needs one.
const KEY = "trueroll-key";
export const get = (id) => document.getElementById(id);

// Create an element. Children are text or elements; text is never parsed as markup.
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// Format a time of day. `seconds`: since 1970.
export function clock(seconds) {
  return new Date(1000 * seconds).toLocaleTimeString("en-GB");
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

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
    get("wrong").textContent = wasWrong ? "This is not the key of this server." : "";
    get("ask").showModal();
    get("ask").oncancel = (event) => event.preventDefault(); // the page has nothing to show without a key
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
