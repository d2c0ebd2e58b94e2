{{/* Folder or file of a model in the services' containers. Of: uri, model. */}}
{{- define "tandem.weights.path" -}}
{{- $folder := ternary (include "tandem.weights.folder" .uri) "" (regexMatch "^(hf|s3)://" .uri) }}
{{- $file := ternary .model.path "" (or (eq $folder "") (hasSuffix ".gguf" .model.path)) }}
{{- list "/models" .model.model $folder $file | compact | join "/" | clean }}
{{- end }}

{{/* A download's folder in its volume: each source has its own. */}}
{{- define "tandem.weights.folder" -}}
{{- $name := regexReplaceAll "[^A-Za-z0-9.]+" (splitList "://" . | last) "-" | trunc 40 | trimAll ".-" }}
{{- printf "%s-%s" $name (sha256sum . | trunc 8) }}
{{- end }}

{{/* A model's volume. Of: uri, model, volume (its name), isTokenizer. */}}
{{- define "tandem.weights.volume" -}}
{{- $place := splitList "://" .uri | last }}
{{- $of := .model.volume }}
- name: {{ .volume }}
  {{- if hasPrefix "pvc://" .uri }}
  persistentVolumeClaim: {claimName: {{ $place }}, readOnly: true}
  {{- else if hasPrefix "oci://" .uri }}
  image: {reference: {{ $place | quote }}, pullPolicy: IfNotPresent}
  {{- else if and .isTokenizer (not (or (hasPrefix "copy://" .uri) (hasSuffix ".gguf" .model.path))) }}
  emptyDir: {sizeLimit: 1Gi}
  {{- else if or .isTokenizer (hasPrefix "copy://" .uri) (not (or $of.claim $of.storageClassName)) }}
  emptyDir: {sizeLimit: {{ $of.size }}}
  {{- else if $of.claim }}
  persistentVolumeClaim: {claimName: {{ $of.claim }}}
  {{- else }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        storageClassName: {{ $of.storageClassName }}
        resources: {requests: {storage: {{ $of.size }}}}
  {{- end }}
{{- end }}

{{/* The init container that fills a model's volume, if one does. Of: root, uri, model, volume, isTokenizer,
     and the image of the service. */}}
{{- define "tandem.weights.init" -}}
{{- $place := splitList "://" .uri | last }}
{{- $isHub := hasPrefix "hf://" .uri }}
{{- if or $isHub (hasPrefix "s3://" .uri) (hasPrefix "copy://" .uri) }}
- name: {{ .volume }}
  imagePullPolicy: {{ .root.Values.images.pullPolicy }}
  {{- if hasPrefix "copy://" .uri }}
  image: {{ .root.Values.images.registry }}{{ $place }}
  {{- else }}
  {{- /* Every service's image has the Hub's client. */}}
  image: {{ ternary .image "docker.io/rclone/rclone:1.71.2" $isHub }}
  command:
    - sh
    - -ec
    - |
      # Several pods may mount the volume. What an attempt has left, the next one uses; the folder appears
      # whole or not at all.
      cd /models
      exec 9> ".$FOLDER.lock"
      flock 9
      test ! -e "$FOLDER" || exit 0
      set -f
      set --
      for file in $FILES; do set -- "$@" --include "$file"; done
      {{- if $isHub }}
      hf download "$SOURCE" --revision "$REVISION" --local-dir ".$FOLDER" "$@"
      {{- else }}
      rclone copy ":s3:$SOURCE" ".$FOLDER" "$@"
      {{- end }}
      mv ".$FOLDER" "$FOLDER"
  env:
    - {name: FOLDER, value: {{ include "tandem.weights.folder" .uri | quote }}}
    {{- if hasSuffix ".gguf" .model.path }}
    - {name: FILES, value: {{ .model.path | quote }}}
    {{- else }}
    - {name: FILES, value: "*.json *.jinja{{ if not .isTokenizer }} *.safetensors{{ end }}"}
    {{- end }}
    {{- if $isHub }}
    - {name: SOURCE, value: {{ splitList "@" $place | first | quote }}}
    - {name: REVISION, value: {{ splitList "@" (printf "%s@main" $place) | rest | first | quote }}}
    # The images are offline otherwise.
    - {name: HF_HUB_OFFLINE, value: "0"}
    - {name: HF_HOME, value: /tmp/huggingface}
    {{- else }}
    - {name: SOURCE, value: {{ $place | quote }}}
    - {name: RCLONE_S3_ENV_AUTH, value: "true"}
    {{- end }}
  {{- with .model.downloadSecret }}
  envFrom:
    - secretRef: {name: {{ . }}}
  {{- end }}
  {{- end }}
  resources:
    requests: {cpu: 50m, memory: 64Mi}
    limits: {memory: 4Gi}
  securityContext:
    {{- include "tandem.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: {{ .volume }}, mountPath: /models}
{{- end }}
{{- end }}
