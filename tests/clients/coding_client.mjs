// Claude Code and Codex CLI read a file and change it. The shipped model is too small to choose the calls itself, so a
// proxy sets the tool of each request and narrows the schemas of its arguments and of the last answer. All else is
// forwarded unchanged.

// needs: @anthropic-ai/claude-code@2.1.332 @openai/codex@0.171.0
import assert from "node:assert";
import { spawn } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, writeFileSync } from "node:fs";
import http from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";

const url = process.argv[2];
const model = (await (await fetch(`${url}/v1/models`)).json()).data[0].id;
const task = "Read fruit.txt and replace apples with pears.";
const offline = { HTTP_PROXY: "http://127.0.0.1:9", HTTPS_PROXY: "http://127.0.0.1:9", NO_PROXY: "127.0.0.1" };

function project() {
  const folder = mkdtempSync(join(tmpdir(), "project-"));
  writeFileSync(join(folder, "fruit.txt"), "apples 3\nplums 5\n");
  return folder;
}

// Forward requests to the server; those that offer tools must call the next of `calls`, or none after the last.
async function proxy(calls) {
  const seen = [];
  const server = http.createServer(async (request, reply) => {
    const chunks = [];
    for await (const chunk of request) chunks.push(chunk);
    let data = Buffer.concat(chunks);
    if (request.method === "POST" && JSON.parse(data).tools?.length) data = steer(JSON.parse(data), calls);
    const headers = { ...request.headers, "content-length": data.length, host: new URL(url).host };
    const forwarded = http.request(url + request.url, { method: request.method, headers }, (answer) => {
      const ignored = answer.headers["x-ignored-fields"];
      seen.push({ path: request.url, status: answer.statusCode, ignored, sent: String(data) });
      reply.writeHead(answer.statusCode, answer.headers);
      answer.pipe(reply);
    });
    forwarded.end(data);
  });
  await new Promise((done) => server.listen(0, "127.0.0.1", done));
  return { address: `http://127.0.0.1:${server.address().port}`, seen, server };
}

function steer(body, calls) {
  const isMessages = Boolean(body.messages);
  const blocks = isMessages ? body.messages.flatMap((message) => message.content) : body.input;
  const done = blocks.filter((block) => ["tool_result", "function_call_output"].includes(block.type)).length;
  const call = calls[done];
  if (call) {
    const tool = body.tools.find((tool) => tool.name === call.name);
    const entries = Object.entries(call.values).map(([name, value]) => [name, { type: "string", const: value }]);
    const properties = Object.fromEntries(entries);
    const schema = { type: "object", properties, required: Object.keys(properties), additionalProperties: false };
    tool[isMessages ? "input_schema" : "parameters"] = schema;
    body.tool_choice = { type: isMessages ? "tool" : "function", name: call.name };
  } else {
    const format = { type: "json_schema", name: "report", schema: { const: "done" } };
    body.tool_choice = isMessages ? { type: "none" } : "none";
    body[isMessages ? "output_config" : "text"] = { format };
  }
  return Buffer.from(JSON.stringify(body));
}

// Run a program; return its exit status and the JSON objects that it wrote, one a line.
async function run(program, words, folder, settings) {
  const env = { PATH: process.env.PATH, LANG: "C.UTF-8", ...offline, ...settings };
  const file = join(process.cwd(), "node_modules/.bin", program);
  const child = spawn(file, words, { cwd: folder, env, stdio: ["ignore", "pipe", "inherit"] });
  let text = "";
  for await (const chunk of child.stdout) text += chunk;
  const status = child.exitCode ?? (await new Promise((done) => child.on("exit", done)));
  return { status, events: text.split("\n").filter((line) => line.startsWith("{")).map((line) => JSON.parse(line)) };
}

function check(folder, seen) {
  assert.equal(readFileSync(join(folder, "fruit.txt"), "utf8"), "pears 3\nplums 5\n");
  assert.deepEqual(seen.map((one) => one.status).filter((status) => status !== 200), [], JSON.stringify(seen));
}

function claude(address, folder, prompt, ...more) {
  const home = mkdtempSync(join(tmpdir(), "home-"));
  const settings = { HOME: home, ANTHROPIC_BASE_URL: address, ANTHROPIC_API_KEY: "none", API_TIMEOUT_MS: "600000" };
  for (const kind of ["", "DEFAULT_HAIKU_", "DEFAULT_SONNET_", "DEFAULT_OPUS_"]) {
    settings[`ANTHROPIC_${kind}MODEL`] = model;
  }
  for (const name of ["TELEMETRY", "ERROR_REPORTING", "AUTOUPDATER"]) settings[`DISABLE_${name}`] = "1";
  settings.CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC = "1";
  const words = ["-p", prompt, "--output-format", "stream-json", "--verbose", "--permission-mode", "acceptEdits"];
  return run("claude", [...words, ...more], folder, settings);
}

async function claudeCode() {
  const folder = project();
  const path = join(folder, "fruit.txt");
  const edit = { file_path: path, old_string: "apples", new_string: "pears" };
  const calls = [{ name: "Read", values: { file_path: path } }, { name: "Edit", values: edit }];
  const { address, seen, server } = await proxy(calls);
  const short = ["--bare", "--tools", "Read,Edit", "--system-prompt", "You change files."];
  const { status, events } = await claude(address, folder, task, ...short);
  server.close();
  const result = events.at(-1);
  const found = [status, result.type, result.is_error, result.num_turns, result.result];
  assert.deepEqual(found, [0, "result", false, 3, '"done"'], JSON.stringify(result));
  check(folder, seen);
  assert(seen.some((one) => one.sent.includes("apples 3")), "the file's text was sent");
}

async function claudeCodeWithALongPrompt() {
  const { events } = await claude(url, project(), "apples ".repeat(10000), "--bare");
  assert.match(events.at(-1).result, /prompt is too long/i);
}

// Run Codex CLI in a new home folder, without its usual instructions: the shipped model has a context of 8,192 tokens.
function codexExec(address, folder, prompt) {
  const home = mkdtempSync(join(tmpdir(), "home-"));
  const settings = { HOME: home, CODEX_HOME: join(home, "codex") };
  mkdirSync(settings.CODEX_HOME);
  writeFileSync(join(home, "instructions.md"), "You change files.");
  writeFileSync(join(settings.CODEX_HOME, "config.toml"), `
model = "${model}"
model_provider = "outpace"
model_context_window = 8192
model_instructions_file = "${join(home, "instructions.md")}"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.outpace]
name = "outpace"
base_url = "${address}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
`);
  const words = ["exec", "--skip-git-repo-check", "--json", "--sandbox", "danger-full-access", prompt];
  return run("codex", words, folder, settings);
}

async function codex() {
  const folder = project();
  const commands = ["cat fruit.txt", "sed -i s/apples/pears/ fruit.txt"];
  const { address, seen, server } = await proxy(commands.map((cmd) => ({ name: "exec_command", values: { cmd } })));
  const { status, events } = await codexExec(address, folder, task);
  server.close();
  assert.deepEqual([status, events.at(-1).type], [0, "turn.completed"], JSON.stringify(events.at(-1)));
  assert.equal(events.filter((event) => event.type === "item.completed").at(-1).item.text, '"done"');
  check(folder, seen);
  const first = seen.find((one) => one.path.startsWith("/v1/responses"));
  assert.match(first.ignored, /client_metadata.*=namespace.*=web_search/);
  assert(seen.some((one) => one.sent.includes("apples 3")), "the command's output was sent");
}

async function codexWithALongPrompt() {
  const { events } = await codexExec(url, project(), "apples ".repeat(10000));
  assert.match(events.at(-1).error.message, /ran out of room in the model's context window/);
}

await claudeCode();
await claudeCodeWithALongPrompt();
await codex();
await codexWithALongPrompt();
