{{/* Labels of the pods of one group. Of: root, component, and of verifiers the model's name. */}}
{{- define "tandem.selector" -}}
app.kubernetes.io/name: tandem
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .model }}
tandem-model: {{ . }}
{{- end }}
{{- end }}

{{/* An object's metadata. Of: root, name, and what it has of component and model. */}}
{{- define "tandem.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "tandem.selector" . | nindent 2 }}
  app.kubernetes.io/part-of: tandem
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end }}

{{/* Everything that templates know of the three services, as JSON: {gateway, drafter, verifiers: [...]}.
     Each has its values, and component, name, ports, health (a port), pauseSeconds (of preStop) and
     startupSeconds; a verifier also model, its name. `config` is what the service's flags are set to. */}}
{{- define "tandem.services" -}}
{{- $release := .Release.Name }}
{{- $drafter := mergeOverwrite (deepCopy .Values.drafter) (dict
      "component" "drafter" "name" (printf "%s-drafter" $release)
      "ports" (dict "grpc" 50051 "metrics" 9101) "health" 50061 "pauseSeconds" 5 "startupSeconds" 300) }}
{{- $gateway := mergeOverwrite (deepCopy .Values.gateway) (dict
      "component" "gateway" "name" (printf "%s-gateway" $release)
      "ports" (dict "grpc" 50050 "http" 8000 "metrics" 9100) "health" 50060 "startupSeconds" 120
      "pauseSeconds" 35) }}
{{- $drafters := printf "%s:50051" $drafter.name }}
{{- $verifiers := list }}
{{- $addresses := list }}
{{- $tokenizers := list }}
{{- $patience := 0 }}
{{- range .Values.models }}
  {{- $verifier := mergeOverwrite (deepCopy $.Values.modelDefaults) . (dict
        "component" "verifier" "name" (printf "%s-verifier-%s" $release .name) "model" .name
        "ports" (dict "grpc" 50052 "metrics" 9102) "health" 50062 "pauseSeconds" 5) }}
  {{- if gt (len $verifier.name) 63 }}
    {{- fail (printf "models: the name %s is too long: %s has over 63 characters" .name $verifier.name) }}
  {{- end }}
  {{- $address := printf "%s:50052" $verifier.name }}
  {{- if has $address $addresses }}
    {{- fail (printf "models: two have the name %s" .name) }}
  {{- end }}
  {{- $isOnGpu := gt (int $verifier.gpus) 0 }}
  {{- $startup := default (ternary 3600 1800 (gt (int $verifier.gpus) 1)) $verifier.startupSeconds }}
  {{- $_ := set $verifier "startupSeconds" (int $startup) }}
  {{- $weights := dict "uri" $verifier.weights "model" $verifier }}
  {{- $tokenizer := dict "uri" (default $verifier.weights $verifier.tokenizer) "model" $verifier }}
  {{- $config := dict
        "model" (include "tandem.weights.path" $weights) "model_id" (default .name .id)
        "device" (ternary "cuda" "cpu" $isOnGpu) "drafters" $drafters "drain_timeout_s" 120 }}
  {{- if $isOnGpu }}
    {{- $_ := set $config "max_num_batched_tokens" 2048 }}
  {{- end }}
  {{- $_ := set $verifier "config" (mergeOverwrite $config $verifier.config) }}
  {{- $addresses = append $addresses $address }}
  {{- $tokenizers = append $tokenizers (include "tandem.weights.path" $tokenizer) }}
  {{- $verifiers = append $verifiers $verifier }}
  {{- $patience = max $patience $verifier.startupSeconds }}
{{- end }}
{{- $config := dict "drain_timeout_s" 20 "max_history_bytes" 1073741824 }}
{{- $_ := set $drafter "config" (mergeOverwrite $config $drafter.config) }}
{{- $aliases := list }}
{{- range $name, $weights := .Values.gateway.aliases }}
  {{- range $id, $weight := $weights }}
    {{- $aliases = append $aliases (printf "%s=%s:%d" $name $id (int $weight)) }}
  {{- end }}
{{- end }}
{{- $config = dict
      "verifiers" $addresses "drafters" $drafters "tokenizer" $tokenizers "drain_timeout_s" 120 }}
{{- if $aliases }}
  {{- $_ := set $config "model_aliases" $aliases }}
{{- end }}
{{- $_ := set $gateway "config" (mergeOverwrite $config $gateway.config) }}
{{- $_ := set $gateway "patienceSeconds" $patience }}
{{- dict "gateway" $gateway "drafter" $drafter "verifiers" $verifiers | toJson }}
{{- end }}
