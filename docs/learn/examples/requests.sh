#!/usr/bin/env bash
# The same with curl: bash docs/learn/examples/requests.sh http://localhost:8000 [KEY]
set -euo pipefail
url="$1"
headers=(-H "content-type: application/json" -H "authorization: Bearer ${2:-none}")

curl -sSf "$url/v1/completions" "${headers[@]}" \
     -d '{"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}'
echo
curl -sSfN "$url/v1/chat/completions" "${headers[@]}" \
     -d '{"messages": [{"role": "user", "content": "What is the capital of Peru?"}], "max_tokens": 20, "stream": true}'
curl -sSf "$url/v1/embeddings" "${headers[@]}" -d '{"input": "Oslo", "encoding_format": "base64"}' | head -c 200
echo
curl -sSf "$url/tokenize" "${headers[@]}" -d '{"prompt": "The capital of France"}'
echo
curl -sSf "$url/health"
echo
