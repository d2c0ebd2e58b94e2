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
     Each has component, name, ports, health, drain_s, pause_s, startup_s, config, and its values; a verifier
     also its model's name. `config` is what the service's flags are set to. */}}
{{- define "tandem.services" -}}
{{- $release := .Release.Name }}
{{- $drafter := mergeOverwrite (deepCopy .Values.drafter) (dict
      "component" "drafter" "name" (printf "%s-drafter" $release)
      "ports" (dict "grpc" 50051 "metrics" 9101) "health" 50061 "pauseSeconds" 5 "startupSeconds" 300) }}
{{- $gateway := mergeOverwrite (deepCopy .Values.gateway) (dict
      "component" "gateway" "name" (printf "%s-gateway" $release)
      "ports" (dict "grpc" 50050 "http" 8000 "metrics" 9100) "health" 50060 "startupSeconds" 120
      "pauseSeconds" 35) }}
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
  {{- $_ := set $verifier "startupSeconds" (int (default (ternary 3600 1800 (gt (int $verifier.gpus) 1)) $verifier.startupSeconds)) }}
  {{- $path := include "tandem.weights.path" (dict "uri" $verifier.weights "model" $verifier) }}
  {{- $config := dict "model" $path "model_id" (default .name .id) "drafters" (printf "%s:50051" $drafter.name) "device" (ternary "cuda" "cpu" (gt (int $verifier.gpus) 0)) "drain_timeout_s" 120 }}
  {{- if gt (int $verifier.gpus) 0 }}
    {{- $_ := set $config "max_num_batched_tokens" 2048 }}
  {{- end }}
  {{- $_ := set $verifier "config" (mergeOverwrite $config $verifier.config) }}
  {{- $addresses = append $addresses $address }}
  {{- $tokenizers = append $tokenizers (include "tandem.weights.path" (dict "uri" (default $verifier.weights $verifier.tokenizer) "model" $verifier)) }}
  {{- $verifiers = append $verifiers $verifier }}
  {{- $patience = max $patience $verifier.startupSeconds }}
{{- end }}
{{- $_ := set $drafter "config" (mergeOverwrite (dict "drain_timeout_s" 20 "max_history_bytes" 1073741824) $drafter.config) }}
{{- $aliases := list }}
{{- range $name, $weights := .Values.gateway.aliases }}
  {{- range $id, $weight := $weights }}
    {{- $aliases = append $aliases (printf "%s=%s:%d" $name $id (int $weight)) }}
  {{- end }}
{{- end }}
{{- if $aliases }}
  {{- $_ := set $gateway "config" (mergeOverwrite (dict "model_aliases" $aliases) $gateway.config) }}
{{- end }}
{{- $_ := set $gateway "config" (mergeOverwrite (dict "verifiers" $addresses "drafters" (printf "%s:50051" $drafter.name) "tokenizer" $tokenizers "drain_timeout_s" 120) $gateway.config) }}
{{- $_ := set $gateway "patienceSeconds" $patience }}
{{- dict "gateway" $gateway "drafter" $drafter "verifiers" $verifiers | toJson }}
{{- end }}
