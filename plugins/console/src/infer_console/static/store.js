// What this browser keeps: chats, up to a number and a size, and the settings of the answers.

const CHATS = "infer.console.chats";
const SETTINGS = "infer.console.settings";
const MODEL = "infer.console.model";
const MOST_CHATS = 50;
const MOST_CHARS = 1 << 20;

function read(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export const readSettings = () => read(SETTINGS, {});

function write(key, text) {
  try {
    localStorage.setItem(key, text);
    return true;
  } catch {
    return false; // no room, or the browser keeps nothing for this page
  }
}

// The model that was chosen last; empty if none was.
export const readModel = () => String(read(MODEL, ""));

export const writeModel = (name) => write(MODEL, JSON.stringify(name));

export const writeSettings = (values) => write(SETTINGS, JSON.stringify(values));

// The newest first.
export function readChats() {
  const chats = read(CHATS, []);
  return Array.isArray(chats) ? chats.filter((chat) => chat?.id && Array.isArray(chat.messages)) : [];
}

// Call back when another tab has changed the chats.
export function onChats(changed) {
  addEventListener("storage", (event) => {
    if (event.key === CHATS || event.key === null) changed();
  });
}

// Keep as many of the newest as there is room for. Returns how many.
export function writeChats(chats) {
  let kept = chats.slice(0, MOST_CHATS);
  for (; kept.length; kept = kept.slice(0, -1)) {
    const text = JSON.stringify(kept, (key, value) => (key === "marks" ? undefined : value));
    if (text.length > MOST_CHARS && kept.length > 1) continue;
    if (write(CHATS, text)) return kept.length;
  }
  write(CHATS, "[]");
  return 0;
}
