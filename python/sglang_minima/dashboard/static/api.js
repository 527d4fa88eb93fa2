// Requests to the server, with the API key when it wants one.

const STORED = "sglang_minima.key";
let key = sessionStorage.getItem(STORED) ?? "";
let asking = null;

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function askForKey(again) {
  // One dialog, however many requests wait for it.
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const input = document.getElementById("key");
    document.getElementById("key-why").textContent = again
      ? "The server does not know this key."
      : "This server asks for a key. It stays in this tab.";
    input.value = "";
    dialog.oncancel = (event) => event.preventDefault();
    dialog.onclose = () => {
      asking = null;
      resolve(input.value);
    };
    dialog.showModal();
  });
  return asking;
}

export async function call(path, body) {
  for (;;) {
    const used = key;
    const headers = used ? { authorization: `Bearer ${used}` } : {};
    const options = { headers, cache: "no-store", signal: AbortSignal.timeout(35000) };
    if (body !== undefined) {
      options.method = "POST";
      options.body = JSON.stringify(body);
      headers["content-type"] = "application/json";
    }
    const reply = await fetch(`dashboard/api/${path}`, options);
    if (reply.status === 401) {
      if (key === used) {
        key = await askForKey(used !== "");
        sessionStorage.setItem(STORED, key);
      }
      continue;
    }
    const data = await reply.json();
    if (!reply.ok) throw new ApiError(reply.status, data.message ?? `status ${reply.status}`);
    return data;
  }
}
