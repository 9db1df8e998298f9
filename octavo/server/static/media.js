// Pictures and speech for a message.
import {byId, el, json, parts, say, sentence} from "./api.js";

const MAX_SIDE = 2048, PHOTO = 2 ** 20;
const {talk, choosePictures, pictures, record, attached, input} = parts(byId("chat"));
const taken = [];
let speech, recorder;

/** Return a picture as a data: URL of few bytes. */
async function read(file) {
  const bitmap = await createImageBitmap(file), scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const [width, height] = [bitmap.width, bitmap.height].map(side => Math.ceil(side * scale)), canvas = el("canvas", {width, height});
  canvas.getContext("2d").drawImage(bitmap, 0, 0, width, height);
  return canvas.toDataURL(width * height > PHOTO ? "image/jpeg" : "image/png");
}
async function attach(files) {
  for (const file of files) try { taken.push(await read(file)); } catch { say(sentence("noPicture", file)); }
  show();
}
export const images = (urls = []) => urls.map((src, i) => el("img", {src, alt: `Picture ${i + 1}`}));
function show() {
  attached.replaceChildren(...images(taken).map((image, i) => (
    el("button.quiet", {"aria-label": `Remove picture ${i + 1}`, onclick: () => { taken.splice(i, 1); show(); input.focus(); }}, image))));
}
export function take() { const urls = taken.splice(0); show(); return urls; }
export function offer(models, chosen) {
  const reads = kind => ({input_modalities: kinds}) => kinds?.includes(kind);
  choosePictures.hidden = !models.filter(reads("image")).some(({id}) => id === chosen);
  speech = models.filter(reads("audio")).find(model => !reads("text")(model));
  record.hidden = !speech || !navigator.mediaDevices;
}
choosePictures.onclick = () => pictures.click();
pictures.onchange = async () => { await attach(pictures.files); pictures.value = ""; };
talk.ondragover = event => event.preventDefault();
talk.ondrop = event => { event.preventDefault(); if (!choosePictures.hidden) attach(event.dataTransfer.files); };
record.onclick = async () => {
  if (recorder) return recorder.stop();
  record.disabled = true;
  try {
    recorder = new MediaRecorder(await navigator.mediaDevices.getUserMedia({audio: true}));
    recorder.ondataavailable = ({data}) => transcribe(data).catch(({message}) => say(message));
    recorder.start();
    record.ariaPressed = "true";
  } catch ({message}) { say(message); } finally { record.disabled = false; }
};
async function transcribe(sound) {
  for (const track of recorder.stream.getTracks()) track.stop();
  [recorder, record.ariaPressed] = [null, "false"];
  const body = new FormData();
  body.append("file", sound, "speech");
  body.append("model", speech.id);
  input.value += ` ${(await json("v1/audio/transcriptions", {body})).text}`;
  input.focus();
}
