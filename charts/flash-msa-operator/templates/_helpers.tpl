{{/* Names are fixed: the Lease, the policies of jobs and the documentation know them. */}}
{{- define "flash-msa.name" -}}flash-msa-operator{{- end }}

{{/* Objects of the cluster carry the namespace, so that two installations do not share them. */}}
{{- define "flash-msa.clusterName" -}}flash-msa-operator:{{ .Release.Namespace }}{{- end }}

{{- define "flash-msa.selector" -}}
app.kubernetes.io/name: flash-msa-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "flash-msa.labels" -}}
{{ include "flash-msa.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "flash-msa.image" -}}
{{- $version := printf ":%s" (.Values.image.tag | default .Chart.AppVersion) -}}
{{- if .Values.image.digest }}{{ $version = printf "@%s" .Values.image.digest }}{{ end -}}
{{ .Values.image.repository }}{{ $version }}
{{- end }}

{{- define "flash-msa.account" -}}
{{- if .Values.serviceAccount.create }}{{ include "flash-msa.name" . }}
{{- else }}{{ required "serviceAccount.name is needed where serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}
