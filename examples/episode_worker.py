"""Plays episodes for a trainer on another machine: python examples/episode_worker.py http://10.0.0.5:8700 KEY"""

import contextlib
import json
import sys
import urllib.error
import urllib.request

import openai


def post(url, key, body):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=90) as response:
        return json.loads(response.read() or "null")


def play(task):
    with openai.OpenAI(base_url=task["base_url"], api_key=task["key"]) as client:
        question = task["row"]["question"]
        answer = client.chat.completions.create(model="any", messages=[{"role": "user", "content": question}])
    return float(task["row"]["answer"] in (answer.choices[0].message.content or ""))


def work(url, key):
    while True:
        task = post(f"{url}/sessions", key, {})
        if task is None:  # no episode within 20 s
            continue
        try:
            end = {"reward": play(task)}
        except Exception as error:
            end = {"error": repr(error)}
        with contextlib.suppress(urllib.error.HTTPError):  # 404: a time limit has ended the episode
            post(f"{task['root']}/end", task["key"], end)


if __name__ == "__main__":
    try:
        work(*sys.argv[1:])
    except OSError as error:  # status 410, or no connection: the trainer has ended
        print(f"no more episodes: {error}")
