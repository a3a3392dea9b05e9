// Conversations in this browser's IndexedDB; in memory where the browser refuses one, as in some private windows.
//
// A conversation is {id, title, changed, model, messages}. Nothing of it leaves the browser but the messages of a request.

const NAME = "tokenloom", TABLE = "conversations";
const memory = new Map();
let opened = null;

function open() {
  opened = opened || new Promise(resolve => {
    let request;
    try { request = indexedDB.open(NAME, 1); } catch { resolve(null); return; }
    request.onupgradeneeded = () => request.result.createObjectStore(TABLE, {keyPath: "id"});
    request.onsuccess = () => resolve(request.result);
    request.onerror = request.onblocked = () => resolve(null);
  });
  return opened;
}

async function run(mode, work) {
  const database = await open();
  if (!database) return null;
  return new Promise((resolve, reject) => {
    const request = work(database.transaction(TABLE, mode).objectStore(TABLE));
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

export async function list() {
  const found = (await run("readonly", table => table.getAll())) || [...memory.values()];
  return found.sort((one, other) => other.changed - one.changed);
}

export async function put(conversation) {
  memory.set(conversation.id, conversation);
  try { await run("readwrite", table => table.put(conversation)); } catch { /* the disk is full: it stays in memory */ }
}

export async function remove(id) {
  memory.delete(id);
  await run("readwrite", table => table.delete(id));
}
