{{- define "tandem.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* A flag's value as a variable's: Helm reads every number as a float. */}}
{{- define "tandem.text" -}}
{{- if kindIs "slice" . }}{{ join "," . }}
{{- else if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}
{{- else if not (kindIs "invalid" .) }}{{ . }}
{{- end }}
{{- end }}

{{/* A service's variables. Of: root, service. */}}
{{- define "tandem.environment" -}}
{{- $service := .service }}
{{- $release := .root.Release.Name }}
{{- $tls := .root.Values.mtls }}
{{- $config := dict "allow_plaintext" (not $tls) "health_listen" (printf "0.0.0.0:%v" $service.health) }}
{{- range $name, $port := $service.ports }}
  {{- $key := ternary "listen" (printf "%s_listen" $name) (eq $name "grpc") }}
  {{- $_ := set $config $key (printf "0.0.0.0:%v" $port) }}
{{- end }}
{{- if $tls }}
  {{- $_ := mergeOverwrite $config (dict "tls_cert" "/tls/tls.crt" "tls_key" "/tls/tls.key") }}
  {{- if eq $service.component "drafter" }}
    {{- $callers := list (printf "%s-verifier" $release) (printf "%s-gateway" $release) }}
    {{- $_ := mergeOverwrite $config (dict "tls_client_ca" "/tls/ca.crt" "allowed_clients" $callers) }}
  {{- else if eq $service.component "verifier" }}
    {{- $callers := list (printf "%s-gateway" $release) }}
    {{- $_ := mergeOverwrite $config (dict "tls_client_ca" "/tls/ca.crt" "allowed_clients" $callers) }}
  {{- end }}
{{- end }}
{{- if ne $service.component "drafter" }}
  {{- $_ := set $config "peer_allow_plaintext" (not $tls) }}
  {{- if $tls }}
    {{- $_ := mergeOverwrite $config (dict
          "peer_tls_ca" "/tls/ca.crt" "peer_tls_cert" "/tls/tls.crt" "peer_tls_key" "/tls/tls.key") }}
  {{- end }}
{{- end }}
{{- if $service.clientsSecret }}
  {{- $_ := set $config "clients" "/clients/clients.yaml" }}
{{- end }}
{{- if $service.snapshots }}
  {{- $_ := set $config "snapshot_dir" "/snapshots" }}
{{- end -}}
{{- range $key, $value := mergeOverwrite $config $service.config }}
- name: TANDEM_{{ upper $service.component }}_{{ upper $key }}
  value: {{ include "tandem.text" $value | quote }}
{{- end }}
{{- with .root.Values.tracing }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- with $service.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* `replicas`, unless an autoscaler sets them. Of: root, service. */}}
{{- define "tandem.replicas" -}}
{{- if not .service.autoscaling -}}
{{- $replicas := .service.replicas -}}
replicas: {{ kindIs "invalid" $replicas | ternary (ternary 2 1 .root.Values.highAvailability) (int $replicas) }}
{{- end }}
{{- end }}

{{/* Seconds from SIGTERM to SIGKILL: preStop, the drain, and the end of the process. Of a service. */}}
{{- define "tandem.grace" -}}
{{- add .pauseSeconds (ceil .config.drain_timeout_s) (ternary 20 10 (gt (int .gpus) 1)) }}
{{- end }}

{{/* A pod's template. Of: root, service, revision (the label of a rollout's pods), and the lists volumes,
     mounts and initContainers of the service's own. */}}
{{- define "tandem.pod" -}}
{{- $service := .service }}
{{- $labels := dict "root" .root "component" $service.component "model" $service.model -}}
metadata:
  labels:
    {{- include "tandem.selector" $labels | nindent 4 }}
    app.kubernetes.io/part-of: tandem
    {{- if regexMatch "hf download|rclone" (toJson .initContainers) }}
    tandem-downloads: "true"
    {{- end }}
  {{- with $service.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ $service.name }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with .root.Values.images.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with $service.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  terminationGracePeriodSeconds: {{ include "tandem.grace" $service }}
  topologySpreadConstraints:
    {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
    - topologyKey: {{ . }}
      maxSkew: 1
      {{- if and $.root.Values.highAvailability (eq . "kubernetes.io/hostname") }}
      whenUnsatisfiable: DoNotSchedule
      # With one machine alone, no other has fewer pods: the second pod would not wait.
      minDomains: 2
      # Machines that are drained would count, too.
      nodeTaintsPolicy: Honor
      {{- else }}
      whenUnsatisfiable: ScheduleAnyway
      {{- end }}
      labelSelector:
        matchLabels:
          {{- include "tandem.selector" $labels | nindent 10 }}
      matchLabelKeys: [{{ $.revision }}]
    {{- end }}
  {{- $nodes := $service.nodeSelector }}
  {{- if and (not $nodes) .root.Values.highAvailability (gt (int $service.gpus) 0) }}
    {{- $nodes = dict "nvidia.com/gpu.present" "true" }}
  {{- end }}
  {{- with $nodes }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- $tolerations := $service.tolerations }}
  {{- if gt (int $service.gpus) 0 }}
    {{- $tolerations = append $tolerations (dict "key" "nvidia.com/gpu" "operator" "Exists" "effect" "NoSchedule") }}
  {{- end }}
  {{- with $tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml .root.Values.podSecurityContext | nindent 4 }}
  {{- with .initContainers }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ $service.component }}
      image: {{ .root.Values.images.registry }}{{ $service.image }}
      imagePullPolicy: {{ .root.Values.images.pullPolicy }}
      {{- if gt (int $service.gpus) 1 }}
      command:
        - python
        - -m
        - torch.distributed.run
        - --standalone
        - --nproc-per-node={{ $service.gpus }}
        # From SIGTERM to SIGKILL: more than the drain.
        - --shutdown-timeout={{ add (ceil $service.config.drain_timeout_s) 15 }}
        - -m
        - verifier
        - --tensor-parallel-size={{ $service.gpus }}
      {{- end }}
      env:
        {{- include "tandem.environment" . | nindent 8 }}
      ports:
        {{- range $name, $port := $service.ports }}
        - {name: {{ $name }}, containerPort: {{ $port }}}
        {{- end }}
        - {name: health, containerPort: {{ $service.health }}}
      startupProbe:
        # Loaded. A gateway has started before it is ready, once it has a verifier.
        grpc: {port: {{ $service.health }}{{ if eq $service.component "gateway" }}, service: tandem.liveness{{ end }}}
        periodSeconds: 2
        failureThreshold: {{ div $service.startupSeconds 2 }}
      readinessProbe:
        grpc: {port: {{ $service.health }}}
        periodSeconds: 5
        timeoutSeconds: 2
        failureThreshold: 2
      livenessProbe:
        grpc: {port: {{ $service.health }}, service: tandem.liveness}
        {{- if eq $service.component "verifier" }}
        # 30 s without a step, two failures and the grace: a hung engine restarts within a minute.
        periodSeconds: 5
        failureThreshold: {{ add 2 (div (sub (int $service.maxStepSeconds) 30) 5) }}
        {{- else }}
        periodSeconds: 10
        failureThreshold: 3
        {{- end }}
        timeoutSeconds: 5
        # A process that hangs cannot drain.
        terminationGracePeriodSeconds: 10
      lifecycle:
        preStop:
          # Until callers that resolve its name now no longer get this pod: those of gateways go by cluster
          # DNS, which caches for up to 30 s.
          sleep: {seconds: {{ $service.pauseSeconds }}}
      resources:
        {{- $resources := deepCopy $service.resources }}
        {{- if gt (int $service.gpus) 0 }}
          {{- $gpus := dict "nvidia.com/gpu" (int $service.gpus) }}
          {{- $resources = mergeOverwrite $resources (dict "requests" (deepCopy $gpus) "limits" $gpus) }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      securityContext:
        {{- include "tandem.containerSecurity" . | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- if .root.Values.mtls }}
        - {name: tls, mountPath: /tls, readOnly: true}
        {{- end }}
        {{- with concat (default list .mounts) $service.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: 512Mi}
    {{- if .root.Values.mtls }}
    - name: tls
      secret: {secretName: {{ .root.Release.Name }}-{{ $service.component }}-tls, defaultMode: 0440}
    {{- end }}
    {{- with concat (default list .volumes) $service.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* Beside the pods of a group: their account, headless Service and disruption budget. Of: root, service. */}}
{{- define "tandem.group" -}}
{{- $metadata := dict "root" .root "name" .service.name "component" .service.component "model" .service.model }}
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "tandem.metadata" $metadata | nindent 2 }}
  {{- with .service.serviceAccountAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
---
apiVersion: v1
kind: Service
metadata:
  {{- include "tandem.metadata" $metadata | nindent 2 }}
spec:
  # Headless: gRPC connections are long-lived, so callers must choose among pods.
  clusterIP: None
  selector:
    {{- include "tandem.selector" $metadata | nindent 4 }}
  ports:
    {{- range $name, $port := .service.ports }}
    - name: {{ $name }}
      port: {{ $port }}
      targetPort: {{ $name }}
      appProtocol: {{ include "tandem.protocol" (dict "root" $.root "port" $name) }}
    {{- end }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "tandem.metadata" $metadata | nindent 2 }}
spec:
  maxUnavailable: 1
  # A pod that is not ready does not hold up the draining of its machine.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "tandem.selector" $metadata | nindent 6 }}
{{- end }}

{{- define "tandem.protocol" -}}
{{- $plain := ternary "kubernetes.io/h2c" "http" (eq .port "grpc") }}
{{- ternary "https" $plain (and .root.Values.mtls (ne .port "metrics")) }}
{{- end }}
