// Builds the page into phalanx/watch/static, with the digest of its sources, by which a test finds a build that is out of date.
import { build } from "esbuild";
import { createHash } from "node:crypto";
import { copyFileSync, mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const target = process.argv[2] ?? join(here, "../phalanx/watch/static");

function sources(folder) {
  return readdirSync(join(here, folder), { withFileTypes: true }).flatMap(entry =>
    entry.isDirectory() ? sources(`${folder}/${entry.name}`) : [`${folder}/${entry.name}`]);
}

mkdirSync(target, { recursive: true });
await build({
  entryPoints: [join(here, "src/page.tsx")],
  bundle: true, minify: true, format: "esm", target: "es2022", legalComments: "none",
  jsx: "automatic", jsxImportSource: "preact", outfile: join(target, "page.js"), logLevel: "warning",
});
for (const name of ["index.html", "icon.svg"]) copyFileSync(join(here, "src", name), join(target, name));
const bundled = Object.keys(JSON.parse(readFileSync(join(here, "package.json"))).dependencies);
writeFileSync(join(target, "licenses.txt"), bundled.map(name => `${name}\n\n${readFileSync(join(here, "node_modules", name, "LICENSE"), "utf8").trim()}\n`).join("\n\n"));

const digest = createHash("sha256");
for (const name of [...sources("src"), "build.mjs", "package.json", "package-lock.json"].sort()) {
  digest.update(name).update("\0").update(readFileSync(join(here, name))).update("\0");
}
writeFileSync(join(target, "build.json"), JSON.stringify({ sources: digest.digest("hex") }) + "\n");
