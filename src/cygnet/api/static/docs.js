// Renders openapi.json as a readable page.

import { byId, make, request } from "./client.js";

const named = (schema) => schema?.$ref?.split("/").pop();

function typeOf(schema, schemas) {
  if (!schema) return "any";
  if (schema.$ref) return named(schema);
  if (schema.anyOf) return schema.anyOf.map((s) => typeOf(s, schemas)).filter((t) => t !== "null").join(" or ");
  if (schema.type === "array") return `list of ${typeOf(schema.items, schemas)}`;
  if (schema.enum) return schema.enum.map((v) => JSON.stringify(v)).join(" or ");
  return schema.type ?? "any";
}

function references(schema, found = new Set()) {
  if (schema && typeof schema === "object") {
    if (schema.$ref) found.add(named(schema));
    Object.values(schema).forEach((part) => references(part, found));
  }
  return found;
}

function table(name, schemas, heading) {
  const schema = schemas[name];
  const body = make("tbody");
  for (const [field, part] of Object.entries(schema.properties ?? {})) {
    const type = make("td", "", typeOf(part, schemas));
    const label = make("td", "", make("code", "", field));
    if (schema.required?.includes(field) && part.default === undefined) label.append(" *");
    body.append(make("tr", "", label, type, make("td", "", part.description ?? "")));
  }
  const head = make("thead", "", make("tr", "", ...["field", "type", "meaning"].map((t) => make("th", "", t))));
  const title = schema.description ? `${heading}: ${schema.description}` : heading;
  return [make("h4", "", title), make("div", "scroll", make("table", "", head, body))];
}

function tables(ref, schemas, heading) {
  const seen = [named(ref)];
  for (let i = 0; i < seen.length; i += 1) {
    for (const inner of references(schemas[seen[i]])) if (!seen.includes(inner)) seen.push(inner);
  }
  return seen.flatMap((name, i) => table(name, schemas, i ? name : `${heading} (${name})`));
}

function curl(method, path, example, keyed) {
  const parts = [`curl ${location.origin}${path}`];
  if (keyed) parts.push("-H 'authorization: Bearer KEY'");
  if (example) parts.push("-H 'content-type: application/json'", `-d '${JSON.stringify(example).replaceAll("'", "'\\''")}'`);
  else if (method === "post") parts.push("-X POST");
  return parts.join(" \\\n  ");
}

function section(path, method, operation, doc) {
  const { schemas } = doc.components;
  const summary = make("summary", "", make("span", `method ${method}`, method.toUpperCase()), make("b", "", path), ` ${operation.summary}`);
  const details = make("details", "", summary);
  const request = operation.requestBody?.content["application/json"];
  details.append(make("pre", "", curl(method, path, request?.example, doc.security)));
  if (request) details.append(...tables(request.schema, schemas, "Request"));
  const answer = operation.responses["200"].content["application/json"]?.schema;
  if (answer?.$ref) details.append(...tables(answer, schemas, "Response"));
  const failures = Object.entries(operation.responses).filter(([code]) => code !== "200");
  if (failures.length) {
    details.append(make("h4", "", "Errors"));
    for (const [code, { description }] of failures) details.append(make("div", "", make("code", "", code), ` ${description}`));
  }
  return details;
}

const doc = await (await request("/openapi.json")).json();
byId("about").textContent = `version ${doc.info.version}. ${doc.info.description}`;
for (const [path, methods] of Object.entries(doc.paths)) {
  for (const [method, operation] of Object.entries(methods)) byId("operations").append(section(path, method, operation, doc));
}
byId("operations").querySelector("details").open = true;
