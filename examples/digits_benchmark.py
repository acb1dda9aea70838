"""Run an image benchmark on a model that examples/grpo_digits.py trained: `python examples/digits_benchmark.py FOLDER`.

Each document of the benchmark has an image, a question, the choices and the index of the right choice, like a document
of lm-eval's multiple-choice tasks. The worker scores each choice after the image and the question. The model's answer
is the choice with the highest log-prob.
"""

import sys

from grpo_digits import PROMPT, WORKER, Digits, ImageProcessor, RolloutClient, launch_worker

folder = sys.argv[1]
digits = Digits.held_out()
documents = [
    dict(image=image, question=PROMPT, choices=list(range(10)), answer=int(label))
    for image, label in zip(digits.images, digits.labels, strict=True)
]

processor = ImageProcessor(folder)
num_right = 0
with launch_worker(folder, **WORKER) as worker, RolloutClient(worker.address) as client:
    sequences, media = [], []
    for document in documents:
        question, images = processor.expand(document["question"], [processor.process(document["image"])])
        sequences += [[*question, choice] for choice in document["choices"]]
        media += [images] * len(document["choices"])
    scores = iter(client.score(sequences, media=media))
    for document in documents:
        found = [next(scores).logprobs[-1] for _ in document["choices"]]
        num_right += found.index(max(found)) == document["answer"]

print(f"accuracy: {num_right / len(documents):.3f} of {len(documents)} images")
